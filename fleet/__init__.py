"""A fleet: many engines behind one queue that owns every accepted request. Processes run on Ray (extra `fleet`)."""
