"""Tracking buffers in another process: in a Ray actor, or behind ``torch.distributed.rpc``.

What other processes send is a call of one of the buffer's methods. Comparing and writing happen
where the buffer is, under the lock of its table (*Atomicity* in the design notes), and the result
comes back in the same round trip. So nothing here compares stamps: it forwards.
"""

from __future__ import annotations
