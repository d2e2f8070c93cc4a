"""Watching processes from outside: seconds and memory. Memory is read from /proc: on Linux alone it is not 0."""
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path


def read_kib(path, name):
    """A field of a file in /proc in bytes; 0 once the process has gone."""
    try:
        match = re.search(rf'^{name}:\s+(\d+) kB', Path(path).read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


def resident(pid='self'):
    """Bytes of a process in memory now."""
    return read_kib(f'/proc/{pid}/status', 'VmRSS')


def peak_resident(pid='self'):
    """The most bytes that a process had in memory so far. (getrusage counts its parent's, too.)"""
    return read_kib(f'/proc/{pid}/status', 'VmHWM')


def proportional(pid='self'):
    """Bytes of a process, each shared page counted in parts (PSS), so that processes add up."""
    return read_kib(f'/proc/{pid}/smaps_rollup', 'Pss')


def run_watched(command, every=0.02, **how):
    """Run a command to its end -> (seconds, peak bytes, exit code)."""
    begun, peak = time.perf_counter(), 0
    with subprocess.Popen(command, **how) as process:
        try:
            while process.poll() is None:
                peak = max(peak, peak_resident(process.pid))
                time.sleep(every)
        except BaseException:
            process.kill()
            raise
    return time.perf_counter() - begun, peak, process.returncode


LIBC = ctypes.CDLL(None) if sys.platform == 'linux' else None


def end_with_parent():
    """In a new process: it is killed when the one that started it ends, however that ends."""
    LIBC.prctl(1, signal.SIGKILL)                                      # PR_SET_PDEATHSIG


def run_within(command, timeout=None, **how):
    """Run a command, and end it with all that it started when the time is up -> CompletedProcess.

    What it runs within a time of its own lives in a session of its own, and ends with it.
    Raises subprocess.TimeoutExpired.
    """
    with subprocess.Popen(command, text=True, start_new_session=True,
                          preexec_fn=end_with_parent if LIBC else None, **how) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def ask_subprocess(script, *words, **how):
    """Run `script --measure WORDS` in a new process -> the JSON object it printed last."""
    command = [sys.executable, str(script), '--measure', *map(str, words)]
    done = run_within(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how)
    if done.returncode:
        raise SystemExit(f'{" ".join(command)} failed:\n{done.stderr[-2000:]}')
    return json.loads(done.stdout.strip().splitlines()[-1])
