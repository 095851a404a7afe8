"""pagetide.scheduler: which sequences run, with how many tokens, in which blocks. Pure logic; no torch."""
