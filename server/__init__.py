"""An OpenAI-compatible server: an HTTP process without torch, and a process of its own for each engine."""
