"""`pagetide replay`: a recorded run, as a trace for Perfetto or as the page."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from .common.error_text import said_of
from .common.recording import FrameRecording, RecordingError
from .frames.perfetto import write_trace
from .serve import check_libraries


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand `replay` to `commands`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="show a recorded run",
        description="Show a run that was recorded with LLM(record=FILE) or `pagetide serve --record FILE`.",
    )
    parser.add_argument("recording", type=Path, metavar="FILE", help="recording to show")
    parser.add_argument("--perfetto", type=Path, metavar="OUT", help="write a trace for ui.perfetto.dev, and exit")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on, of this machine only (default 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="port to listen on; 0 picks a free one (default 8000)"
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns its exit status."""
    try:
        recording = FrameRecording(args.recording)
    except (OSError, RecordingError) as error:
        print(f"pagetide replay: {said_of(error)}", file=sys.stderr)
        return 2
    with recording:
        if args.perfetto is not None:
            return export(recording, args.perfetto)
        return show(recording, args.host, args.port)


def export(recording: FrameRecording, out: Path) -> int:
    """Write the trace of `recording` to `out`, which is replaced once it is complete. Returns the exit status."""
    part = out.with_name(f"{out.name}.part-{os.getpid()}")
    try:
        with part.open("w", encoding="utf-8") as file:
            lines = (frame.line for frame in recording.frames())
            number = write_trace(lines, recording.began, recording.header, file)
        part.replace(out)
    except OSError as error:
        print(f"pagetide replay: {out} cannot be written: {error}", file=sys.stderr)
        return 1
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        print(f"pagetide replay: {recording.path} contains invalid frames: {error!r:.200}", file=sys.stderr)
        return 1
    finally:
        part.unlink(missing_ok=True)
    print(f"{out}: {number:,} events of {recording.ended - recording.began:,.1f} s")
    return 0


def show(recording: FrameRecording, host: str, port: int) -> int:
    """Serve the page over `recording`. Returns the exit status."""
    check_libraries("pagetide replay")
    from .server.replay import serve_recording
    from .server.run import CannotServe

    try:
        return serve_recording(recording, host, port)
    except CannotServe as error:
        print(f"pagetide replay: {error}", file=sys.stderr)
        return 2
