"""`AsyncLLM` in a process that is interrupted, and that ends without a stop."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import asyncio, os, signal, sys, threading
from pagetide import AsyncLLM, SamplingParams
options = dict(device="cpu", kv_memory="1MiB")
new = SamplingParams(max_new_tokens=480)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

async def main():
    async with AsyncLLM(sys.argv[1], **options) as llm:
        tasks = [asyncio.create_task(llm.generate([5], new)) for _ in range(5)]
        async for chunk in llm.stream([5, 6], new):
            if len(threading.enumerate()) > 1:
                signal.raise_signal(signal.SIGINT)

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted", [thread.name for thread in threading.enumerate()])
llm = AsyncLLM(sys.argv[1], **options)  # never stopped, in the middle of its work as the interpreter ends
loop = asyncio.new_event_loop()
stream = llm.stream([5, 6], new)
loop.run_until_complete(anext(stream))
"""


def test_an_interrupt_and_an_exit_without_a_stop() -> None:
    """In a process of its own: Ctrl-C goes to the main thread, whose loop cancels; nothing hangs, nothing is left."""
    command = [sys.executable, "-P", "-c", SCRIPT, "demo"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "interrupted ['MainThread']\n", "")
