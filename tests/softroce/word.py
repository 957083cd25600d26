"""Raises a flag by RDMA WRITEs of one word, which its owner resets at once, and counts how often it
is found raised again: with pyverbs alone, to show what `hold.c` does. Run by Debian's Python."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import pyverbs.enums as e
from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

FLAG, ONE, TURN, TAKEN = range(0, 256, 64)  # words, each on a cache line of its own


def own(words: memoryview, turns: int) -> None:
    for turn in range(1, turns + 1):
        while words[TURN] != turn or words[FLAG] == 0:
            pass
        words[FLAG] = 0
        words[TAKEN] = turn


def main() -> None:
    turns = int(sys.argv[1])
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    words = memoryview(memory).cast("I")
    if os.fork() == 0:
        own(words, turns)
        os._exit(0)
    words[ONE] = 1
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    context = Context(name=os.environ["SOFTROCE_DEVICE"])
    domain = PD(context)
    completions = CQ(context, 1)
    access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
    region = MR(domain, mmap.PAGESIZE, access, address=address)
    wanted = QPInitAttr(
        qp_type=e.IBV_QPT_RC, scq=completions, rcq=completions, cap=QPCap(1, 1, 1, 1, 0)
    )
    attributes = QPAttr(port_num=1)
    attributes.qp_access_flags = access
    pair = QP(domain, wanted, attributes)
    index = int(os.environ["SOFTROCE_GID_INDEX"])
    itself = GlobalRoute(dgid=context.query_gid(1, index), sgid_index=index, hop_limit=1)
    attributes.ah_attr = AHAttr(is_global=1, port_num=1, gr=itself)
    attributes.dest_qp_num, attributes.path_mtu = pair.qp_num, e.IBV_MTU_1024
    attributes.timeout, attributes.retry_cnt = 21, 7
    pair.to_rts(attributes)
    again = 0
    for turn in range(1, turns + 1):
        words[TURN] = turn
        request = SendWR(
            opcode=e.IBV_WR_RDMA_WRITE,
            num_sge=1,
            sg=[SGE(address + 4 * ONE, 4, region.lkey)],
            send_flags=e.IBV_SEND_SIGNALED,
        )
        request.set_wr_rdma(region.rkey, address + 4 * FLAG)
        pair.post_send(request)
        while not (done := completions.poll(1))[0]:
            pass
        assert done[1][0].status == e.IBV_WC_SUCCESS
        while words[TAKEN] != turn:
            pass
        again += words[FLAG]
        words[FLAG] = 0
    print(f"raised {turns} times, and {again} times again")


main()
