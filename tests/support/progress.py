"""Progress of many runs that is not shown."""

from __future__ import annotations


class Silent:
    """Progress that shows nothing and lists the runs that were started."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def start_run(self, name: str) -> None:
        self.started.append(name)

    def finish_run(self, *args: object) -> None: ...

    def fail_run(self, *args: object) -> None: ...

    def __call__(self, *args: object) -> None: ...
