"""Rank 1 of a job of two, written with pyverbs alone: it runs no line of the transport under test.

It speaks the protocol of verbs/ (path.hpp, connection_manager.hpp, memory.cpp, flags.hpp) and of
group.hpp, below native/: endpoints and the world's memory are described through the store,
connections are agreed on by datagrams, and a barrier, the creation of a segment and heartbeats are
writes into memory of rank 0. Its flags arrive as immediates, since rank 0's device asks for these;
ours are always written. Only the store's client is pgasdl's. The layouts are repeated here: whoever
changes one there notices it here.
"""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

import pyverbs.enums as e
from pyverbs.addr import AH, GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR
from siphash import siphash

from pgasdl.runtime.bootstrap import Store

MAGIC = 0x367672656C646770
ME, PEER, SIZE = 1, 0, 2
INTRODUCTION = struct.Struct("<QiIQ")  # host, process, queue depth, bytes of a passive message
# magic, datagrams, mtu, reads, lid, link, n_gids, P_Key, global routes, whether flags wait for
# completions, whether all are immediates, GIDs
ENDPOINT = struct.Struct("<QIIIIIIIIII128s")
PKEY = 0xFFFF
# magic, tag, from, to, queue, count; number, first packet, shared memory, its key and padding of
# the end; joined, answer
DATAGRAM = struct.Struct("<QQiiIIIIQIIII")
TAG = slice(8, 16)
# bytes, data, board, its words, keys, board's number, whether it is on a GPU; padding
DESCRIPTION = struct.Struct("<QQQIIIIII")
SLOT = struct.Struct("<IIII")  # board, notification, middle bits of the value, whether it is used
N_SLOTS = 256
TAKEN = N_SLOTS * SLOT.size  # where the number of immediates that were taken is
N_IMMEDIATES = 128  # receives that are held ready; half of them are offered anew at a time
# before it: bytes, the segment's id, what is wrong, whether it is on a GPU, whether peers reach it
HEAD = struct.Struct("<QIIII")
NO_FAULT = 2**32 - 1
HEADER = struct.Struct("<QQII32s")  # of a slot: fingerprint, bytes of all, bytes, generation, what
LEFT = 0xFFFFFFFF
ROCE_V2 = 1
PASSIVE_BYTES = 65536
GRH_BYTES = 40
N_RECEIVES = 16
EXCHANGE_SLOT = HEADER.size + 1024
REDUCE_SLOT = HEADER.size + 8192
RECORD_BYTES = 16  # beat, own health
RECORDS_BYTES = STATES_BYTES = 64
EXCHANGE_ID = 32  # the notification of the exchange's only step: those of barriers are before it
N_IDS = EXCHANGE_ID + 4 * SIZE
BLOCK, REGION, LINE = 64, 2048, 16  # notifications that one word marks as used; words of a line
HEALTHY, CLOSED = 0, 4
ACCESS = (
    e.IBV_ACCESS_LOCAL_WRITE
    | e.IBV_ACCESS_REMOTE_WRITE
    | e.IBV_ACCESS_REMOTE_READ
    | e.IBV_ACCESS_REMOTE_ATOMIC
)
BEAT = 0.1
PATIENCE = 30.0


def board_words(notifications: int) -> int:
    """Words of a board: notifications, a gap, and the marks of regions and blocks of them."""
    return notifications + LINE - 1 - (-notifications // REGION) - (-notifications // BLOCK)


@dataclass
class Remote:
    """A segment of rank 0."""

    nbytes: int
    data: int
    board: int
    words: int
    data_key: int
    board_key: int

    def marks(self, number: int) -> tuple[int, int]:
        """Words by which whoever waits for any notification finds this one."""
        n = next(n for n in range(self.words, -1, -1) if board_words(n) <= self.words)
        regions = -(-n // LINE) * LINE
        return regions + number // REGION, regions - (-n // REGION) + number // BLOCK

    @classmethod
    def parse(cls, blob: bytes) -> Remote:
        return cls(*DESCRIPTION.unpack(blob)[:6])


class Memory:
    """A segment of this rank: data and board, each registered; ``number``: the board's."""

    def __init__(self, pd: PD, nbytes: int, notifications: int, number: int) -> None:
        self.nbytes, self.words, self.number = nbytes, board_words(notifications), number
        self.data = MR(pd, nbytes, ACCESS)
        self.board = MR(pd, 4 * self.words, ACCESS)
        self.data.write(bytes(nbytes), nbytes)
        self.board.write(bytes(4 * self.words), 4 * self.words)

    def describe(self) -> bytes:
        return DESCRIPTION.pack(self.nbytes, self.data.buf, self.board.buf, self.words,
                                self.data.rkey, self.board.rkey, self.number, 0, 0)  # fmt: skip

    def flag(self, number: int) -> int:
        return int.from_bytes(self.board.read(4, 4 * number), "little")


class End:
    """This rank's end of a connection: what rank 0 writes of its flags, and their immediates."""

    def __init__(self, pd: PD, pair: QP) -> None:
        self.pair, self.n_taken = pair, 0
        self.shared = MR(pd, TAKEN + 12, ACCESS)
        self.shared.write(bytes(TAKEN + 12), TAKEN + 12)
        for _ in range(2):
            self.offer()

    def offer(self) -> None:
        nowhere = SGE(self.shared.buf, 0, self.shared.lkey)
        for _ in range(N_IMMEDIATES // 2):
            self.pair.post_recv(RecvWR(num_sge=1, sg=[nowhere]))

    def take(self, immediate: int) -> tuple[int, int, int]:
        """Board, notification and value of a flag."""
        slot = self.shared.read(SLOT.size, (immediate >> 24) * SLOT.size)
        board, notification, middle, used = SLOT.unpack(slot)
        assert used == 1
        self.n_taken += 1
        if self.n_taken % (N_IMMEDIATES // 2) == 0:
            self.offer()
        self.shared.write(self.n_taken.to_bytes(4, "little"), 4, TAKEN)
        return board, notification, (immediate & 0xFFF000) << 8 | middle | immediate & 0xFFF


class Foreign:
    """The rank. All progress happens in :meth:`turn`, which every wait calls."""

    def __init__(self, store: Store) -> None:
        info = {"host": "elsewhere", "asked": "verbs", "oversubscribed": False, "missing": {}}
        store.exchange("rank", json.dumps(info).encode())
        self.token = store.token
        self.context = Context(name=os.environ["SOFTROCE_DEVICE"])
        self.gid_index = int(os.environ["SOFTROCE_GID_INDEX"])
        self.pd = PD(self.context)
        self.cq = CQ(self.context, 256)
        self.immediates = CQ(self.context, 4 * N_IMMEDIATES)
        self.ends: dict[int, tuple[End, int]] = {}  # by queue: ours, and the number of theirs
        self.admitted: list[QP] = []
        self.memories: list[Memory] = []
        self.gone = False
        self._open_datagrams()
        self._meet(store)
        self.n_beats = self.generation = self.round = 0
        self.next_beat = 0.0

    # --- meeting

    def _open_datagrams(self) -> None:
        slot = GRH_BYTES + DATAGRAM.size
        self.slot_bytes = slot
        self.buffer = MR(self.pd, (N_RECEIVES + 1) * slot, e.IBV_ACCESS_LOCAL_WRITE)
        self.datagram_cq = CQ(self.context, 2 * N_RECEIVES)
        self.datagram_key = siphash(self.token, b"queue key") & 0x7FFFFFFF
        attributes = QPAttr(port_num=1)
        attributes.qkey = self.datagram_key
        wanted = QPInitAttr(qp_type=e.IBV_QPT_UD, scq=self.datagram_cq, rcq=self.datagram_cq,
                            cap=QPCap(N_RECEIVES, N_RECEIVES, 1, 1, 0), sq_sig_all=1)  # fmt: skip
        self.datagrams = QP(self.pd, wanted, attributes)
        for number in range(N_RECEIVES):
            self._offer(number)

    def _offer(self, number: int) -> None:
        piece = SGE(self.buffer.buf + number * self.slot_bytes, self.slot_bytes, self.buffer.lkey)
        self.datagrams.post_recv(RecvWR(wr_id=number, num_sge=1, sg=[piece]))

    def _meet(self, store: Store) -> None:
        gid = str(self.context.query_gid(1, self.gid_index))
        raw = bytes.fromhex(gid.replace(":", ""))
        mtu = self.context.query_port(1).active_mtu
        endpoint = ENDPOINT.pack(
            MAGIC, self.datagrams.qp_num, mtu, 16, 0, ROCE_V2, 1, PKEY, 0, 0, 0, raw
        )
        mine = INTRODUCTION.pack(0x5EED, os.getpid(), 1024, PASSIVE_BYTES) + endpoint
        there = store.exchange("endpoint", mine)[PEER][INTRODUCTION.size :]
        magic, self.number_there, mtu_there, self.reads, _, _, n_gids, pkey, *_, gids = (
            ENDPOINT.unpack(there)
        )
        assert (magic, pkey) == (MAGIC, PKEY)
        self.mtu = min(mtu, mtu_there)
        self.route = AHAttr(is_global=1, port_num=1, gr=self._route(gids[: 16 * n_gids]))
        self.address = AH(self.pd, attr=self.route)
        # All ranks' memory has one size, and only rank 0 knows the length of its first part.
        n_gossip = RECORDS_BYTES + SIZE * STATES_BYTES
        n_slots = 2 * SIZE * (EXCHANGE_SLOT + REDUCE_SLOT + 8 + PASSIVE_BYTES)
        most = self._memory(n_gossip + n_slots + 4096, N_IDS)
        self.control = most
        self.there = Remote.parse(store.exchange("world", most.describe())[PEER])
        assert self.there.words == board_words(N_IDS)
        self.gossip = self.there.nbytes - n_slots - n_gossip
        assert 0 < self.gossip <= 4096
        self.slots = self.gossip + n_gossip
        self.source = MR(self.pd, 4096, e.IBV_ACCESS_LOCAL_WRITE)

    def _route(self, gids: bytes) -> GlobalRoute:
        """To the peer's GID that shares most with ours: both stand for IPv4 addresses."""
        own = bytes.fromhex(str(self.context.query_gid(1, self.gid_index)).replace(":", ""))
        all_gids = [gids[i : i + 16] for i in range(0, len(gids), 16)]
        best = min(all_gids, key=lambda gid: bytes(a ^ b for a, b in zip(gid, own, strict=True)))
        text = ":".join(best.hex()[i : i + 4] for i in range(0, 32, 4))
        return GlobalRoute(dgid=GID(text), sgid_index=self.gid_index, hop_limit=64)

    def _memory(self, nbytes: int, notifications: int) -> Memory:
        made = Memory(self.pd, nbytes, notifications, len(self.memories))
        self.memories.append(made)
        return made

    # --- connections

    def turn(self) -> None:
        """Handle what arrived; send a heartbeat when it is due."""
        ends = {end.pair.qp_num: end for end, _ in self.ends.values()}
        for done in self.immediates.poll(N_IMMEDIATES)[1]:
            assert done.opcode == e.IBV_WC_RECV_RDMA_WITH_IMM
            immediate = int.from_bytes(struct.pack("=I", done.imm_data), "big")
            board, notification, value = ends[done.qp_num].take(immediate)
            self.memories[board].board.write(value.to_bytes(4, "little"), 4, 4 * notification)
        _, completions = self.datagram_cq.poll(N_RECEIVES)
        for done in completions:
            if done.opcode & e.IBV_WC_RECV and done.byte_len == self.slot_bytes:
                at = done.wr_id * self.slot_bytes + GRH_BYTES
                self._take(self.buffer.read(DATAGRAM.size, at))
            if done.opcode & e.IBV_WC_RECV:
                self._offer(done.wr_id)
        # Rank 0's own record, as it wrote it here: after a farewell nothing can be sent to it.
        record = self.control.data.read(RECORD_BYTES, self.gossip + (1 + PEER) * RECORD_BYTES)
        self.gone |= record[8] == CLOSED
        if self.admitted and not self.gone and time.monotonic() > self.next_beat:
            self.beat()

    def _take(self, came: bytes) -> None:
        magic, tag, sender, to, queue, count, end, first, *_, joined, answer = DATAGRAM.unpack(came)
        assert (magic, tag, sender, to) == (MAGIC, self._tag_of(came), PEER, ME)
        if count == LEFT:
            self.gone = True
            return
        assert count == 0
        if queue not in self.ends:
            self.ends[queue] = self._join(end, first), end
        ours, theirs = self.ends[queue]
        assert theirs == end
        if joined == ours.pair.qp_num and ours.pair not in self.admitted:
            self.admitted.append(ours.pair)
        if answer:
            self._answer(queue, ours, theirs, joined != ours.pair.qp_num)

    def _tag_of(self, datagram: bytes) -> int:
        """Over all of it, with nothing in the tag's place."""
        return siphash(self.token, datagram[: TAG.start] + bytes(8) + datagram[TAG.stop :])

    def _answer(self, queue: int, ours: End, theirs: int, ask: bool) -> None:
        datagram = DATAGRAM.pack(MAGIC, 0, ME, PEER, queue, 0, ours.pair.qp_num, 0,
                                 ours.shared.buf, ours.shared.rkey, 0, theirs, ask)  # fmt: skip
        tag = self._tag_of(datagram).to_bytes(8, "little")
        datagram = datagram[: TAG.start] + tag + datagram[TAG.stop :]
        at = N_RECEIVES * self.slot_bytes
        self.buffer.write(datagram, len(datagram), at)
        piece = SGE(self.buffer.buf + at, len(datagram), self.buffer.lkey)
        request = SendWR(opcode=e.IBV_WR_SEND, num_sge=1, sg=[piece],
                         send_flags=e.IBV_SEND_SIGNALED)  # fmt: skip
        request.set_wr_ud(self.address, self.number_there, self.datagram_key)
        self.datagrams.post_send(request)

    def _join(self, number: int, first_packet: int) -> End:
        wanted = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.immediates,
                            cap=QPCap(64, N_IMMEDIATES, 1, 1, 0))  # fmt: skip
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = ACCESS
        pair = QP(self.pd, wanted, attributes)
        attributes.dest_qp_num, attributes.rq_psn = number, first_packet
        attributes.path_mtu, attributes.ah_attr = self.mtu, self.route
        attributes.max_dest_rd_atomic = attributes.max_rd_atomic = min(16, self.reads)
        attributes.min_rnr_timer = 12
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = 14, 6, 6
        attributes.sq_psn = 0
        pair.to_rts(attributes)
        return End(self.pd, pair)

    # --- what a rank does

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"the foreign rank waits in vain for {what}"
            self.turn()

    def post(self, opcode: int, local: tuple[int, int, int], address: int, key: int) -> None:
        """Post one request on a connection, and wait for its completion."""
        request = SendWR(opcode=opcode, num_sge=1, sg=[SGE(*local)],
                         send_flags=e.IBV_SEND_SIGNALED)  # fmt: skip
        if opcode == e.IBV_WR_ATOMIC_FETCH_AND_ADD:
            request.set_wr_atomic(key, address, 1, 0)
        else:
            request.set_wr_rdma(key, address)
        self.admitted[0].post_send(request)
        deadline = time.monotonic() + PATIENCE
        while True:
            n_done, completions = self.cq.poll(1)
            if n_done:
                status = completions[0].status
                assert status == e.IBV_WC_SUCCESS, f"request {opcode} ended with status {status}"
                return
            assert time.monotonic() < deadline, "a request does not complete"

    def write(self, data: bytes, address: int, key: int) -> None:
        self.source.write(data, len(data))
        local = self.source.buf, len(data), self.source.lkey
        self.post(e.IBV_WR_RDMA_WRITE, local, address, key)

    def raise_flag(self, remote: Remote, number: int, value: int) -> None:
        for word, content in (*((mark, 1) for mark in remote.marks(number)), (number, value)):
            self.write(struct.pack("<I", content), remote.board + 4 * word, remote.board_key)

    def read(self, nbytes: int, address: int, key: int) -> bytes:
        local = self.source.buf, nbytes, self.source.lkey
        self.post(e.IBV_WR_RDMA_READ, local, address, key)
        return self.source.read(nbytes, 0)

    def add_one(self, address: int, key: int) -> int:
        """The old value."""
        local = self.source.buf, 8, self.source.lkey
        self.post(e.IBV_WR_ATOMIC_FETCH_AND_ADD, local, address, key)
        return int.from_bytes(self.source.read(8, 0), "little")

    def beat(self) -> None:
        """Send a heartbeat: still alive, and no loss known."""
        self.n_beats += 1
        self.next_beat = time.monotonic() + BEAT
        record = struct.pack("<QQ", self.n_beats, HEALTHY)
        at = self.there.data + self.gossip + (1 + ME) * RECORD_BYTES
        self.write(record, at, self.there.data_key)

    def connect(self) -> None:
        """Rank 0 asks for the connections; this one only ever answers."""
        self.until(lambda: bool(self.admitted), "a connection")

    def barrier(self) -> None:
        self.round += 1
        self.raise_flag(self.there, 0, self.round)
        self.until(lambda: self.control.flag(0) >= self.round, "rank 0 in the barrier")

    def segment(self, nbytes: int, notifications: int) -> tuple[Memory, Remote]:
        """Collective: exchange descriptions as ``Group::allgather`` does."""
        own = self._memory(nbytes, notifications)
        self.generation += 1
        # Slots are by distance, and the other rank's is 1.
        slot = self.slots + ((self.generation & 1) * SIZE + 1) * EXCHANGE_SLOT
        body = HEAD.pack(nbytes, self.generation, NO_FAULT, 0, 1) + own.describe()
        header = HEADER.pack(1, len(body), len(body), self.generation, b"segment")
        self.write(header + body, self.there.data + slot, self.there.data_key)
        self.raise_flag(self.there, EXCHANGE_ID, self.generation)
        self.until(lambda: self.control.flag(EXCHANGE_ID) >= self.generation, "a segment")
        header = self.control.data.read(HEADER.size, slot)
        fingerprint, _, n_body, generation, what = HEADER.unpack(header)
        assert (fingerprint, generation) == (1, self.generation), what
        body = self.control.data.read(n_body, slot + HEADER.size)
        return own, Remote.parse(body[HEAD.size :])

    def leave(self) -> None:
        """Stay until rank 0 has said farewell: it closes when it expects nothing more from here."""
        self.next_beat = math.inf
        self.until(lambda: self.gone, "rank 0's farewell")
