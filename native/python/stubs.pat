# How the generated stub differs from what the module tells of itself.

# Its value is this machine's.
pgasdl._native.isa:
    isa: str
