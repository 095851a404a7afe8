"""Kills of a fleet's processes under load: every accepted request ends once, with the tokens of an undisturbed run.

PYTHONPATH=tests python -m fleet_kills [--requests 300] [--kills 30] [--seed N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from fleets import FleetProcess, ResumingClient, StreamResult, pause

from pagetide import LLM, SamplingParams

PROMPTS = ("The sea was", "Call me Ishmael", "To be, or not", "It was the best of times", "The whale", "O Romeo", "A king")
BATCH = 60  # requests that a batch file has too
ENGINE = {"kv_memory": "32MiB", "dtype": "float32", "device": "cpu", "max_seqs": 16}


def bodies(count: int, seed: int, most_tokens: int) -> list[dict[str, Any]]:
    """Requests, greedy and sampled."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        body = {
            "model": "demo", "prompt": f"{rng.choice(PROMPTS)} {number % 7}", "temperature": rng.choice((0.0, 0.9)),
            "max_tokens": rng.randint(most_tokens // 8, most_tokens), "seed": rng.randrange(2**32),
        }  # fmt: skip
        if number % 5 == 0:
            body["stop"] = ["king", "\n\n"]
        found.append(body)
    return found


def undisturbed(requests: list[dict[str, Any]]) -> list[tuple[str, list[int], str]]:
    """Text, tokens and finish reason of each request, by an engine in this process."""
    params = [
        SamplingParams(
            max_new_tokens=body["max_tokens"], temperature=body["temperature"], seed=body["seed"], stop=body.get("stop")
        )
        for body in requests
    ]
    with LLM("demo", **ENGINE) as llm:
        outputs = llm.generate([body["prompt"] for body in requests], params)
    return [(output.text, output.token_ids, output.finish_reason) for output in outputs]


class Killer:
    """Kills processes of a fleet at random moments.

    Attributes:
        deaths: Times at which workers were killed.
    """

    def __init__(self, fleet: FleetProcess, seed: int, roles: tuple[str, ...]) -> None:
        self._fleet = fleet
        self._rng = random.Random(seed)
        self._roles = roles
        self.deaths: list[float] = []
        self.log: list[str] = []

    def kill(self, role: str) -> bool:
        """Kill a process of a role, if there is one."""
        found = self._fleet.actors(role)
        if not found:
            return False
        victim = self._rng.choice(found)
        with suppress(psutil.Error):
            victim.send_signal(signal.SIGKILL)
            if role == "WorkerActor":
                self.deaths.append(time.monotonic())
            self.log.append(f"{time.strftime('%X')} {role} {victim.pid}")
            return True
        return False

    async def run(self, kills: int, every_s: float) -> None:
        """Kill `kills` processes, sometimes two at once."""
        done = 0
        while done < kills:
            await asyncio.sleep(self._rng.uniform(0.2, 1.8) * every_s)
            for _ in range(1 + (self._rng.random() < 0.2)):
                role = self._rng.choice(self._roles)
                done += await asyncio.to_thread(self.kill, role)


async def disturbed(
    fleet: FleetProcess, requests: list[dict[str, Any]], kills: int, seed: int, every_s: float, at_once: int, pause_s: float
) -> tuple[list[StreamResult], Killer, list[tuple[str, list[int], str]]]:
    """Stream all requests, and run a batch file of some, while processes are killed."""
    client, room = ResumingClient(fleet.urls, give_up_s=150.0), asyncio.Semaphore(at_once)
    killer = Killer(fleet, seed, ("WorkerActor", "WorkerActor", "WorkerActor", "QueueActor", "FrontActor"))

    async def one(number: int) -> StreamResult:
        await asyncio.sleep(number * kills * every_s / len(requests))  # spread over the time of the kills
        async with room:
            return await client.stream(requests[number], f"{seed}-{number}", number)

    async def kill() -> None:
        if pause_s:
            workers = await asyncio.to_thread(fleet.actors, "WorkerActor")
            if workers:
                pause(workers[0], pause_s)
        await killer.run(kills, every_s)

    killing = asyncio.create_task(kill())
    batch = asyncio.create_task(asyncio.to_thread(run_batch, fleet, requests[:BATCH]))
    results = await asyncio.gather(*(one(number) for number in range(len(requests))))
    await killing
    return list(results), killer, await batch


def batch_line(body: dict[str, Any]) -> str:
    """A request as a line of a batch file."""
    line = {name: body[name] for name in ("prompt", "temperature", "seed", "max_tokens")}
    return json.dumps(line | ({"stop": body["stop"]} if "stop" in body else {}))


def run_batch(fleet: FleetProcess, requests: list[dict[str, Any]]) -> list[tuple[str, list[int], str]]:
    """The records of a batch file of these requests, by `pagetide run --fleet`, which is started again if it fails."""
    source, target = fleet.folder / "batch.jsonl", fleet.folder / "records.jsonl"
    source.write_text("\n".join(map(batch_line, requests)) + "\n")
    line = ("run", "--fleet", "local", "--fleet-name", fleet.name, "--input", str(source), "--output", str(target))
    for _ in range(10):
        found = fleet.command(*line, "--output-token-ids", timeout_s=600.0)
        if found.returncode == 0:
            break
        time.sleep(1.0)
    assert found.returncode == 0, found.stderr
    records = [json.loads(one) for one in target.read_text().splitlines()]
    return [(one["text"], one["token_ids"], one["finish_reason"]) for one in records]


def differences(results: list[StreamResult], expected: list[tuple[str, list[int], str]]) -> list[str]:
    """What is wrong with each result."""
    found = []
    for number, (result, (text, token_ids, reason)) in enumerate(zip(results, expected, strict=True)):
        if result.num_ends != 1:
            found.append(f"request {number} has ended {result.num_ends} times: {result.error}")
        elif (result.text, result.token_ids, result.finish_reason) != (text, token_ids, reason):
            found.append(f"request {number} differs after {result.num_connections} connections: {result.text!r} != {text!r}")
    return found


def gaps_after_deaths(results: list[StreamResult], deaths: list[float]) -> list[float]:
    """The longest wait of a stream for its next token, of those during which a worker died, counted from the death."""
    found = []
    for result in results:
        for at, gap in result.gaps[1:]:
            within = [at - death for death in deaths if at - gap < death < at]
            if within and gap > 0.5:
                found.append(max(within))
    return sorted(found)


def run(requests: int, kills: int, workers: int, seed: int, pause_s: float, folder: Path, every_s: float = 4.0) -> list[str]:
    """One run. Returns what is wrong; prints a summary."""
    asked = bodies(requests, seed, 900)
    expected = undisturbed(asked)
    settings = {"workers": workers, "front_ends": 2, "engine": ENGINE, "threads": 1}
    with FleetProcess(folder, **settings) as fleet:
        began = time.monotonic()
        results, killer, batch = asyncio.run(disturbed(fleet, asked, kills, seed, every_s, 48, pause_s))
        wrong = differences(results, expected)
        wrong += [f"line {i} of the batch differs: {one}" for i, one in enumerate(batch) if one != expected[i]]
        if len(batch) != min(BATCH, requests):
            wrong.append(f"the batch has {len(batch)} records")
        status = fleet.status()
        if wrong:
            print(fleet.logs()[-20000:], file=sys.stderr)
    gaps = gaps_after_deaths(results, killer.deaths)
    p99 = gaps[int(0.99 * (len(gaps) - 1))] if gaps else 0.0
    print(
        f"seed {seed}: {requests} requests, {len(killer.log)} kills ({len(killer.deaths)} of workers) in "
        f"{time.monotonic() - began:.0f} s; {sum(one.num_connections - 1 for one in results)} reconnections, "
        f"{status['queue']['requeued']} requests moved since the queue's last start; {len(gaps)} streams waited for another "
        f"worker, p99 {p99:.2f} s; {len(wrong)} wrong"
    )
    for line in killer.log:
        print("  " + line)
    return wrong


def main() -> int:
    """Run as a command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pagetide-kills-") as folder:
        wrong = run(args.requests, args.kills, 4, args.seed, 60.0, Path(folder))
    for line in wrong:
        print(line)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
