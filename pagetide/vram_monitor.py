"""The command `vram-monitor`: look at the memory of the devices, watch it for others (`serve`), record it (`record`)."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from . import __version__
from .monitor.config import MonitorConfig
from .monitor.errors import AlreadyMonitored, MonitorError
from .monitor.snapshot import Snapshot

if TYPE_CHECKING:
    from .monitor.record import RecordReader

log = logging.getLogger("vram-monitor")

ALREADY_MONITORED_STATUS = 3
UNUSED_CHECK_S = 0.1

_WATCHING = ("source", "devices", "interval", "detail_interval", "runtime_dir", "capacity", "members")
_SERVING = (*_WATCHING, "metrics_port", "metrics_address", "group", "log_level")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, 2 for bad input, 3 where another monitor runs, 130 when interrupted."""
    args = parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        status = run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has seen enough
        sys.stderr.close()
        return 141
    except AlreadyMonitored as error:
        print(f"vram-monitor: {error}", file=sys.stderr)
        return ALREADY_MONITORED_STATUS
    except (MonitorError, OSError) as error:
        print(f"vram-monitor: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """All options. Each is None where it is not given, so that a configuration file can say it."""
    top = argparse.ArgumentParser(
        prog="vram-monitor",
        description="See who holds the memory of the GPUs. Without a command: a live view, which q ends.",
    )
    top.add_argument("--version", action="version", version=f"vram-monitor {__version__}")
    top.add_argument("-1", "--once", action="store_true", help="print the view once and end")
    top.add_argument("--json", action="store_true", help="print JSON and end; with --interval a line each interval")
    top.add_argument("-o", "--only", dest="devices", nargs="+", metavar="DEVICE", help="only these indices or uuids")
    top.add_argument("-i", "--interval", dest="refresh", metavar="SECONDS", help="between two pictures (default 1)")
    top.add_argument("--no-color", action="store_true", help="no colours (so does NO_COLOR)")
    _add_source(top)
    top.set_defaults(run=_view)
    commands = top.add_subparsers(metavar="COMMAND", title="commands")

    serve = commands.add_parser(
        "serve", help="watch the devices for the engines of this user, or of this machine",
        description="Watch the devices and publish what is seen: to engines through shared memory, to Prometheus "
        "through a metrics page. SIGHUP reads the configuration again, SIGTERM and SIGINT end it.",
    )  # fmt: skip
    serve.add_argument("--config", type=Path, metavar="FILE", help="settings in YAML; flags go before them")
    _add_source(serve)
    _add_polling(serve)
    serve.add_argument("--devices", metavar="I,J", help="only these indices or uuids (default: all)")
    serve.add_argument(
        "--metrics-port", metavar="N", help="port of the metrics page; 0 takes a free one (default: none)"
    )
    serve.add_argument("--metrics-address", metavar="A", help="its address (default 127.0.0.1)")
    serve.add_argument("--group", metavar="G", help="watch for the whole machine, in /run/pagetide, for this group")
    serve.add_argument("--log-level", metavar="L", help="debug, info, warning, error (default info)")
    serve.add_argument("--until-unused", action="store_true", help=argparse.SUPPRESS)  # as `monitor.watch` starts it
    serve.set_defaults(run=_serve)

    record = commands.add_parser(
        "record", help="write what is seen to a file, to be played with --source replay:FILE",
        description="Write what is seen to a file, until interrupted or for --duration.",
    )  # fmt: skip
    record.add_argument("file", type=Path, metavar="FILE")
    record.add_argument("--duration", type=float, metavar="SECONDS", help="how long (default: until interrupted)")
    record.add_argument("--devices", metavar="I,J", help="only these indices or uuids (default: all)")
    _add_source(record)
    _add_polling(record)
    record.set_defaults(run=_record)
    return top


def _add_source(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("what is watched")
    group.add_argument("--source", metavar="S", help="auto, nvml, host or replay:FILE (default auto)")
    group.add_argument("--capacity", metavar="SIZE", help="with the host: a test device of this size, like 2GiB")
    group.add_argument("--members", metavar="PID,...", help="with --capacity: the processes that are on it")
    group.add_argument(
        "--runtime-dir", metavar="DIR", help="where the record lies (default: PAGETIDE_RUNTIME_DIR, ...)"
    )


def _add_polling(command: argparse.ArgumentParser) -> None:
    command.add_argument("--interval", metavar="SECONDS", help="between two readings of memory (default 0.02)")
    command.add_argument("--detail-interval", metavar="SECONDS", help="of load and processes (default 1)")


def _settings(args: argparse.Namespace, names: Sequence[str], file: Path | None = None) -> MonitorConfig:
    return MonitorConfig.resolve(file, {name: getattr(args, name, None) for name in names})


# ---- serve --------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    from .monitor.daemon import Daemon

    sys.setswitchinterval(0.0005)  # a thread that lists processes must not hold up the one that reads memory
    config = _settings(args, _SERVING, args.config)
    _log_to_stderr(config.log_level)
    signals = _Signals()
    daemon = Daemon(config)
    daemon.start()
    try:
        while (taken := signals.wait(UNUSED_CHECK_S if args.until_unused else None)) in (None, signal.SIGHUP):
            if taken == signal.SIGHUP:
                _reload(daemon, args)
            if args.until_unused and daemon.unused():
                log.info("nobody watches any more")
                break
    finally:
        daemon.stop()
    log.info("ended")
    return 0


class _Signals:
    """SIGTERM, SIGINT and SIGHUP, taken one at a time by who waits for them.

    They are blocked, in the threads that start later too, instead of handled: a handler runs between any two steps of the
    main thread, and one that sets an Event while that thread is inside the Event's own lock never returns.
    """

    _TAKEN: ClassVar = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}

    def __init__(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, self._TAKEN)

    def wait(self, timeout_s: float | None) -> int | None:
        """The next signal, or None when the time is over. Without a time it waits for one."""
        if timeout_s is None:
            return signal.sigwait(self._TAKEN)
        taken = signal.sigtimedwait(self._TAKEN, max(0.0, timeout_s))
        return None if taken is None else taken.si_signo


def _reload(daemon: Any, args: argparse.Namespace) -> None:
    try:
        daemon.reload(_settings(args, _SERVING, args.config))
        logging.getLogger().setLevel(daemon.config.log_level.upper())
        log.info("configuration read again")
    except MonitorError as error:
        log.error("the configuration was read again and is not used: %s", error)


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)


# ---- looking ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _observed(config: MonitorConfig) -> Iterator[Callable[[], Snapshot]]:
    """Snapshots from the monitor that runs; without one, or for a source that was named, from a poller of our own."""
    from .monitor.daemon import directory_of
    from .monitor.runtime_dir import readable_dirs
    from .monitor.watching import live_reader

    if config == MonitorConfig(runtime_dir=config.runtime_dir, devices=config.devices):
        running = live_reader(readable_dirs() if config.runtime_dir is None else (directory_of(config),))
        if running is not None:
            with running:
                yield _only(running, config.devices)
            return
    with _polled(config) as read:
        yield read


def _only(reader: RecordReader, devices: Sequence[str]) -> Callable[[], Snapshot]:
    """Snapshots of these devices, or of all if none are named. Raises NoSuchDevice."""
    from .monitor.poller import select

    if not devices:
        return reader.snapshot
    uuids = {info.uuid for info in select(reader.devices(), devices)}

    def read() -> Snapshot:
        snapshot = reader.snapshot()
        return replace(snapshot, devices=tuple(device for device in snapshot.devices if device.info.uuid in uuids))

    return read


@contextlib.contextmanager
def _polled(config: MonitorConfig) -> Iterator[Callable[[], Snapshot]]:
    """Snapshots from a poller in this process, the first of them complete."""
    from .monitor.poller import Poller
    from .monitor.record import RecordReader, RecordWriter
    from .monitor.sources.opening import open_source

    source = open_source(config.source, capacity_bytes=config.capacity, members=config.members)
    with RecordWriter.private(source=source.name) as writer, RecordReader.of(writer) as reader:
        poller = Poller(
            source, writer,
            interval_s=config.interval, detail_interval_s=config.detail_interval, devices=config.devices,
        )  # fmt: skip
        try:
            poller.start()
            _wait_for_answers(reader.snapshot)
            yield reader.snapshot
        finally:
            poller.stop()


def _wait_for_answers(read: Callable[[], Snapshot], timeout_s: float = 3.0) -> None:
    """Wait until every device was asked for everything once, but not for one that does not answer."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if all(device.memory.at_ns and device.detail.at_ns for device in read().devices):
            return
        time.sleep(0.005)


def _view(args: argparse.Namespace) -> int:
    refresh = MonitorConfig.resolve(None, {"interval": args.refresh or 1.0}).interval
    config = _settings(args, ("source", "devices", "runtime_dir", "capacity", "members"))
    with _observed(config) as read:
        if args.json:
            return _print_json(read, refresh if args.refresh else None)
        from rich.console import Console

        from .monitor.view import live

        console = Console(no_color=True if args.no_color else None, highlight=False)
        if args.once or not console.is_terminal:
            live.render_once(read(), console)
        else:
            live.run_live(read, interval_s=refresh, console=console)
    return 0


def _print_json(read: Callable[[], Snapshot], interval_s: float | None) -> int:
    from .monitor.view.as_json import to_json

    print(to_json(read(), indent=1 if interval_s is None else None), flush=True)
    while interval_s is not None:
        time.sleep(interval_s)
        print(to_json(read()), flush=True)
    return 0


def _record(args: argparse.Namespace) -> int:
    from .monitor.errors import ConfigInvalid
    from .monitor.recording import RecordingWriter

    if args.duration is not None and not args.duration > 0:
        raise ConfigInvalid(f"--duration must be a number of seconds above 0, got {args.duration:g}")
    config = _settings(args, _WATCHING)
    signals = _Signals()
    with _observed(config) as read, RecordingWriter(args.file, read()) as recording:
        begun = due = time.monotonic()
        while args.duration is None or due - begun < args.duration:
            due += config.interval
            if signals.wait(due - time.monotonic()) is not None:
                break
            recording.write(read())
    return 0


if __name__ == "__main__":
    sys.exit(main())
