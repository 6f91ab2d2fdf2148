"""The cases of tests/models and their runs: without a tool, under ours, and under msProbe."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jobs
import peer

JOB = Path(__file__).with_name("model_job.py")
LEVELS = ("L0", "L1", "mix")

#: Every case, with the rules of `peer_rules` by which rows of it differ from msProbe's.
CASES = {
    "plain.transformer": {"bits", "given twice", "another way", "bound early"},
    "plain.lstm": {"unused"},
    "plain.data_loader": set(),
    "plain.ddp_accumulation": set(),
    "plain.fsdp2": {
        "bits",
        "given twice",
        "another way",
        "bound early",
        "below the dispatcher",
    },
    "library.llama": {"bits", "keyword tensors", "handed on"},
    "library.gpt2": {"handed on"},
    "library.bert": {"bits"},
    "library.vit": set(),
    "library.mixtral": {
        "bits",
        "keyword tensors",
        "handed on",
        "own parameters",
        "several outputs",
    },
    "library.t5": {"bits", "keyword tensors", "handed on"},
    "library.whisper": {"bits", "keyword tensors", "handed on", "several outputs"},
    "library.mamba": {"bits", "handed on", "own parameters"},
    "library.resnet": {"in place", "handed on", "several outputs"},
    "training.lora": {"bits", "keyword tensors", "handed on", "signature"},
    "training.trainer": {"bits", "keyword tensors", "handed on"},
    "training.accelerate": {"bits", "keyword tensors", "handed on"},
    "more.qwen2_beams": {"bits", "keyword tensors", "handed on"},
    "more.checkpointed": {"bits", "keyword tensors", "handed on", "recomputed"},
    "more.deberta": {"bits", "keyword tensors", "handed on"},
    "more.clip": {"bits", "keyword tensors", "several outputs"},
}
#: Cases whose results and records are looked at, but not beside msProbe's.
ALONE = (
    "more.gemma2_static_cache",
    "more.assisted",
    "more.wav2vec2",
    "more.swin",
    "more.convnext",
    "more.recurrent_gemma",
    "more.ia3",
    "more.prefix_tuning",
)
NEEDS = {
    "plain": (),
    "library": ("transformers",),
    "training": ("transformers", "peft", "accelerate"),
    "more": ("transformers", "peft"),
}
RANKS = {"plain.ddp_accumulation": 2, "plain.fsdp2": 2}


def lacks(case):
    """The libraries that a case needs and this environment does not have."""
    wanted = NEEDS[case.split(".")[0]]
    return [name for name in wanted if importlib.util.find_spec(name) is None]


@dataclass
class Result:
    """An ended run; `bits` are the digests of its results by rank."""

    status: int
    output: str
    bits: dict
    dump: Path

    def changed(self, other):
        """Names of the results that differ from those of another run."""
        assert self.bits.keys() == other.bits.keys()
        return [
            name
            for rank in self.bits
            for (name, digest), (_, theirs) in zip(self.bits[rank], other.bits[rank], strict=True)
            if digest != theirs
        ]


class Runs:
    """Runs cases, each once per tool and level."""

    def __init__(self, root):
        self._root = root
        self._servers = {}
        self._results = {}

    def bare(self, case):
        """The run without a tool. torch's own threads now and then abort a process that is over; it
        is made once more then, which says nothing of any tool."""
        first = self.get(case, "none", "L1")
        if first.status and "terminate called without an active exception" in first.output:
            return self.get(case, "none", "L0")  # the level is nobody's
        return first

    def get(self, case, tool, level):
        key = (case, tool, level)
        if key not in self._results:
            self._results[key] = self._run(*key)
        return self._results[key]

    def close(self):
        for server in self._servers.values():
            server.stdin.close()
            server.wait(30)
            server.stdout.close()

    def _run(self, case, tool, level):
        folder = self._root / f"{case}-{tool}-{level}"
        folder.mkdir()
        config, bits, log = folder / "config.json", folder / "bits", folder / "log"
        settings = {"level": level, "risk_level": "ALL", "dump_path": str(folder / "dump")}
        settings |= {"task": "statistics", "statistics": {}}
        if tool == "rankscope":
            settings["rankscope"] = {"exit_seconds": 60}
        config.write_text(json.dumps(settings))
        python = peer.PYTHON if tool == "msprobe" else sys.executable
        arguments = [case, tool, str(bits), str(config)]
        if ranks := RANKS.get(case):
            status = self._torchrun(python, ranks, arguments, log)
        else:
            server = self._server(python, case.split(".")[0])
            job = dict(zip(("case", "tool", "bits", "config"), arguments, strict=True))
            print(json.dumps(job | {"log": str(log)}), file=server.stdin, flush=True)
            status = int(server.stdout.readline())
        found = {path.name: json.loads(path.read_text()) for path in sorted(bits.glob("*.json"))}
        return Result(status, log.read_text(), found, folder / "dump")

    def _torchrun(self, python, ranks, arguments, log):
        torchrun = [python, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, f"--nproc-per-node={ranks}", str(JOB), *arguments]
        with log.open("w") as file:
            return subprocess.call(command, stdout=file, stderr=file, env=_environment())

    def _server(self, python, group):
        if (python, group) not in self._servers:
            self._servers[python, group] = subprocess.Popen(
                [python, str(JOB), "serve", group],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=_environment(),
            )
        return self._servers[python, group]


def _environment():
    # Gemma makes its masks in the order of a set of strings.
    fixed = {"PYTHONHASHSEED": "0"}
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return jobs.environment(**fixed, **quiet)
