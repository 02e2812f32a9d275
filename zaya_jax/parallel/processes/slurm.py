"""Parsers for SLURM's variables: lists of hosts, tasks per node, and the name of this job.

They follow `scontrol show hostnames` (src/common/hostlist.c), including its unusual order of names. Newer
versions print suffixes such as `n[1-2]-ib`, which 22.05 rejects; they are read as names that end in the
suffix.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from zaya_jax.errors import UserError

JOB, JOB_NODES, TASKS_PER_NODE = "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"
MAX_HOSTS = 65_536
"""Maximum number of hosts in a list, equal to SLURM's MAX_RANGE, so that a bad variable cannot use up
memory."""
# One name of a list; commas within its brackets do not end it.
_ENTRY = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_LIST = re.compile(rf"[,\s]*{_ENTRY.pattern}(?:[,\s]+{_ENTRY.pattern})*[,\s]*")
_BRACKET = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([1-9][0-9]{0,8})(?:\(x([1-9][0-9]{0,8})\))?")


@dataclasses.dataclass(frozen=True)
class SlurmJob:
    """The SLURM job of this process.

    Attributes:
      name: job ID; ARRAY_TASK for a task of an array, because the ID alone may address the whole array.
      hosts: names of the allocation's nodes, in SLURM's order.
      tasks: number of tasks on each node.
    """

    name: str
    hosts: tuple[str, ...]
    tasks: tuple[int, ...]


def find_job(environment: Mapping[str, str]) -> SlurmJob:
    """Reads the job from the variables that SLURM sets.

    Raises:
      UserError: if a variable is missing or malformed.
    """
    if missing := [name for name in (JOB, JOB_NODES) if not environment.get(name)]:
        raise UserError(
            f"--engine=slurm needs {' and '.join(missing)}, which SLURM sets in a job; start the command "
            "with sbatch configs/cluster/slurm.sh or in an allocation of salloc"
        )
    hosts = expand_hosts(environment[JOB_NODES], name=JOB_NODES)
    return SlurmJob(job_name(environment), tuple(hosts), _tasks(environment, len(hosts)))


def job_name(environment: Mapping[str, str]) -> str:
    """Returns the name by which scancel and scontrol address only this job.

    In one task of an array the job ID equals that of the array, and would address all of its tasks.
    """
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment[JOB]


def expand_hosts(text: str, *, name: str = "the host list") -> list[str]:
    """Returns the hosts of a list such as "rack[1-2]n[01-04],login", in the order of scontrol.

    Args:
      text: host list, as SLURM prints it.
      name: name of its variable, for errors.

    Raises:
      UserError: for a list that is malformed, empty, or longer than `MAX_HOSTS`.
    """
    if not _LIST.fullmatch(text):
        raise _bad_hosts(text, name)
    hosts: list[str] = []
    for entry in _ENTRY.findall(text):
        brackets = [_bracket(each, text, name) for each in _BRACKET.findall(entry)]
        if len(hosts) + math.prod(map(len, brackets)) > MAX_HOSTS:
            raise UserError(f'{name} is "{text}"; it has more than {MAX_HOSTS:,} hosts')
        hosts += _combine(_BRACKET.split(entry)[::2], brackets)
    return hosts


def _combine(literals: Sequence[str], brackets: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the names of one entry of a list.

    The last bracket varies fastest, then the first, the second and so on, as in scontrol.
    """
    # scontrol's order of "a[1-2]b[1-2]c[1-2]" is a1b1c1, a1b1c2, a2b1c1, a2b1c2, a1b2c1, ...
    if not brackets:
        yield literals[0]
        return
    *slow, fast = brackets
    for *values, last in itertools.product(*reversed(slow), fast):
        parts = itertools.zip_longest(literals, [*reversed(values), last], fillvalue="")
        yield "".join(itertools.chain.from_iterable(parts))


def _bracket(text: str, whole: str, name: str) -> list[str]:
    """Returns the numbers of a bracket such as "001-003,7", padded like the first number of each range."""
    numbers: list[str] = []
    for part in re.sub(r"\s", "", text).split(","):
        match = _RANGE.fullmatch(part)
        # Without a match the range 1 to 0 is empty, which the check below rejects.
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not first <= last < first + MAX_HOSTS:
            raise _bad_hosts(whole, name)
        numbers += [f"{number:0{len(match[1])}}" for number in range(first, last + 1)]
    return numbers


def _bad_hosts(text: str, name: str) -> UserError:
    return UserError(f'{name} is "{text}"; it must be a list of hosts, such as "n[01-04],login"')


def expand_counts(text: str, *, name: str = TASKS_PER_NODE) -> list[int]:
    """Returns the number of tasks on each node: [4, 8, 8] for "4,8(x2)".

    Args:
      text: counts, as SLURM prints them.
      name: name of their variable, for errors.

    Raises:
      UserError: for a text of another form, or more than `MAX_HOSTS` counts.
    """
    counts = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None or len(counts) + int(match[2] or 1) > MAX_HOSTS:
            raise UserError(f'{name} is "{text}"; it must be counts of tasks per node, such as "4,8(x2)"')
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _tasks(environment: Mapping[str, str], num_hosts: int) -> tuple[int, ...]:
    """Returns the number of tasks of each node; if the job requested a number per node, that number."""
    name = next((each for each in ("SLURM_NTASKS_PER_NODE", TASKS_PER_NODE) if environment.get(each)), None)
    counts = [1] if name is None else expand_counts(environment[name], name=name)
    if len(counts) == 1:
        counts *= num_hosts
    if len(counts) != num_hosts:
        raise UserError(
            f'{name} is "{environment[name or ""]}", {len(counts)} nodes; {JOB_NODES} has {num_hosts}'
        )
    return tuple(counts)
