"""One bin file, from its header to the last of its outputs; what fails is told, never raised."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankdump.contract.errors import EmptyFileError, PermanentError
from rankdump.convert import names, out
from rankdump.convert.request import Failure, Job, Mapped, Outcome, Request
from rankdump.convert.tensor import made, wanted
from rankdump.dumpdata import BinFile, Payload, open_bin


@dataclass(slots=True)
class _Told:
    """What is known of a file so far."""

    job: Job
    tensors: int = 0
    bytes_written: int = 0
    failures: list[Failure] = field(default_factory=list[Failure])
    warnings: list[Failure] = field(default_factory=list[Failure])
    mapped: list[Mapped] = field(default_factory=list[Mapped])

    def fail(self, where: str, error: Exception) -> None:
        """Note what went wrong, without the path that the line has anyway."""
        self.failures.append(Failure(self.job.path, where + _words(error, self.job)))

    def outcome(self, *, empty: bool = False) -> Outcome:
        """Return it as a value."""
        return Outcome(
            self.job.path,
            self.tensors,
            self.bytes_written,
            empty,
            tuple(self.failures),
            tuple(self.warnings),
            tuple(self.mapped),
        )


def convert_file(job: Job, request: Request) -> Outcome:
    """Convert one file; its folder is there."""
    told = _Told(job)
    try:
        opened = open_bin(job.path)
    except EmptyFileError:
        return told.outcome(empty=True)
    except (PermanentError, MemoryError) as error:
        told.fail("", error)
        return told.outcome()
    held = [payload for payload in opened.payloads if wanted(job.path.name, payload, request)]
    for payload in held:
        _convert_payload(told, opened, payload, request)
    if request.side and not held:
        told.failures.append(Failure(job.path, f"there is no {request.side} {request.index}"))
    return told.outcome()


def _convert_payload(told: _Told, opened: BinFile, payload: Payload, request: Request) -> None:
    job, where = told.job, f"{payload.kind} {payload.index}: "
    try:
        result = made(job.path.name, payload, opened.bytes_of(payload), request)
        name = names.on_disk(result.name)
        told.bytes_written += out.write(job.folder, name, result.parts)
    except (PermanentError, MemoryError, OSError) as error:
        told.fail(where, error)
        return
    told.tensors += 1
    if name != result.name:
        told.mapped.append(Mapped(job.folder, name, result.name))
    if result.warning:
        told.warnings.append(Failure(job.path, where + result.warning))


def _words(error: Exception, job: Job) -> str:
    if isinstance(error, MemoryError):
        return "there is not enough memory for it"
    if isinstance(error, OSError):
        return f"cannot be written: {error.strerror}"
    return str(error).removeprefix(f"{job.path}: ")
