"""Plans bound to memory: the choice of a plan, persistent handles, and ``ctx.allreduce``."""
