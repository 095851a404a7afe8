"""Intake and delivery: requests from callers to the scheduler, and their outputs back."""
