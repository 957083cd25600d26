"""Plans bound to memory: which plan runs when, persistent handles, and ``ctx.allreduce``."""
