"""pagetide.scheduler: who runs, with how many tokens, in which blocks. Pure logic; no torch."""
