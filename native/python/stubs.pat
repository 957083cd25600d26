# Where the generated stub says less, or more, than it should. Each entry is a name as a pattern and
# what stands in the stub instead.

# Its value is this machine's.
pgasdl._native.isa:
    isa: str

# Python 3.11 has it as a slot only, later ones as a method, too.
pgasdl._native.SegmentCore.__buffer__:

pgasdl._native.SegmentCore.__suffix__:
    def __buffer__(self, flags: int, /) -> memoryview: ...

pgasdl._native.ContextCore._connect$:
    def _connect(self, endpoints: list[bytes], /) -> None: ...

pgasdl._native.ContextCore._join:
    def _join(self, descriptions: list[bytes], timeout: float, /) -> None: ...

pgasdl._native.ContextCore._health:
    def _health(self) -> list[str]: ...

pgasdl._native.ContextCore.(write|read)_list$:
    def \1_list(self, pairs: Sequence[tuple[Slice, Slice]], peer: int, *, queue: int = 0, timeout: float | None = None) -> None:
        \doc

pgasdl._native.ContextCore.write_list_notify_on:
    def write_list_notify_on(self, stream: object | None, pairs: Sequence[tuple[Slice, Slice]], peer: int, segment: SegmentCore, notification: int, value: int = 1, *, queue: int = 0, timeout: float | None = None) -> None:
        \doc

pgasdl._native.ContextCore.(write_list_notify|read_list_notify|write_list_notify_add)$:
    def \1(self, pairs: Sequence[tuple[Slice, Slice]], peer: int, segment: SegmentCore, notification: int, value: int = 1, *, queue: int = 0, timeout: float | None = None) -> None:
        \doc

pgasdl._native.GroupCore.attach:
    def attach(self, descriptions: list[bytes], timeout: float, /) -> None: ...

pgasdl._native.GroupCore.ranks:
    @property
    def ranks(self) -> tuple[int, ...]: ...

pgasdl._native.GroupCore.allgather:
    def allgather(self, reduction: bool, what: str, fingerprint: int, mine: bytes, timeout: float | None = None) -> list[bytes]: ...

pgasdl._native.GroupCore.passive_receive:
    def passive_receive(self, timeout: float | None = None) -> tuple[int, bytes]: ...

pgasdl._native.buffer_key:
    def buffer_key(buffer: object | None) -> tuple[int, int, str] | None:
        \doc
