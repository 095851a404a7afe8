"""`pagetide demo`: the bundled model under memory pressure, live in a terminal; alone, or two engines on one device."""
