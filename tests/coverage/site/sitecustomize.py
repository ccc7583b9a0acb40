"""For `tests/coverage/measure.py` alone: coverage in every Python process of a test run, those that are killed included.

SGLang ends its processes with SIGKILL, so what is saved at exit is lost: the lines are written twice a second, to one file a
process that is replaced as a whole. Beside it lies what the process was and which modules of the package it had imported.

This directory stands first on PYTHONPATH and is put there again in every child, since the rig gives its engines a path of their
own; the debug child, which reads no site, gets it in its code. A sitecustomize further down the path runs as it always does.
"""

import atexit
import contextlib
import importlib.machinery
import json
import os
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
DATA = os.environ.get("SERVING_COVERAGE")
PACKAGE = "sglang_eagle3_plugin"
WRITER = f"from {PACKAGE}.runtime.debug.writer import main"
EVERY_S = 0.5


class Saver:
    """Saves what one process has run; after a fork the child saves for itself."""

    def __init__(self, coverage):
        self.coverage = coverage
        self.lock = threading.Lock()
        self.measuring = coverage.Coverage(config_file=False, data_file=None, include=[f"*/{PACKAGE}/*"], messages=False)
        self.measuring.set_option("run:disable_warnings", ["no-data-collected"])  # in a process that is none of ours
        self.measuring.start()
        os.register_at_fork(before=self.lock.acquire, after_in_parent=self.lock.release, after_in_child=self.forked)
        atexit.register(self.save)
        self.name = f"{os.getpid()}.{time.time_ns():x}"
        self.saved = None
        self.off = False
        threading.Thread(target=self.run, name="coverage", daemon=True).start()

    def forked(self):
        self.lock.release()
        self.name = f"{os.getpid()}.{time.time_ns():x}"
        # It saves where it leaves. One that pytest forks may be watched for each file that it touches, and saves nothing.
        self.off = "pytest" in sys.modules

    def run(self):
        while True:
            time.sleep(EVERY_S)
            with contextlib.suppress(Exception):
                self.save()

    def save(self):
        if self.off:
            return
        with self.lock:
            data = self.measuring.get_data()
            lines = {file: data.lines(file) for file in data.measured_files()}
            state = (sum(map(len, lines.values())), len(sys.modules))
            if state == self.saved or not lines:
                return
            self.saved = state
            unfinished = os.path.join(DATA, f"unfinished.{self.name}")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished)
            written = self.coverage.CoverageData(basename=unfinished)
            written.add_lines(lines)
            written.close()
            os.replace(unfinished, os.path.join(DATA, f".coverage.{self.name}"))
            with open("/proc/self/cmdline", "rb") as file:
                title = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
            seen = {
                "argv": sys.orig_argv,
                "title": title,
                "prefix": sys.prefix,
                "modules": sorted(name for name in list(sys.modules) if name.partition(".")[0] == PACKAGE),
            }
            with open(unfinished, "w") as file:
                json.dump(seen, file)
            os.replace(unfinished, os.path.join(DATA, f"modules.{self.name}.json"))


def measure_children():
    """Let every child that is Python find this directory first, whatever environment it is given."""
    stock = subprocess.Popen.__init__

    def init(self, args, *more, **options):
        given = options.get("env")
        environment = dict(os.environ if given is None else given)
        if environment.get("SERVING_COVERAGE", DATA) == DATA and len(more) < 10:
            path = [one for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one and one != HERE]
            options["env"] = environment | {"PYTHONPATH": os.pathsep.join([HERE, *path]), "SERVING_COVERAGE": DATA}
        if isinstance(args, list) and "-S" in args:
            args = [f"import runpy; runpy.run_path({__file__!r}); {one}" if WRITER in str(one) else one for one in args]
        stock(self, args, *more, **options)

    subprocess.Popen.__init__ = init


def save_before_leaving(saver):
    """`os._exit` is how a child of multiprocessing ends, and it runs nothing else."""
    stock = os._exit

    def leave(status):
        with contextlib.suppress(Exception):
            saver.save()
        stock(status)

    os._exit = leave


def chain():
    """Run the sitecustomize that this one stands before."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p or ".") != HERE])
    if spec is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if DATA:
    sys.path.append(os.path.join(os.path.dirname(DATA), f"python{sys.version_info[0]}.{sys.version_info[1]}"))
    with contextlib.suppress(ImportError):  # another Python than those of the tests, a build's say
        import coverage

        made = Saver(coverage)
        measure_children()
        save_before_leaving(made)
if __name__ == "sitecustomize":
    chain()
