"""``pgasdl bench plans`` and ``pgasdl tune``: every plan measured beside its prediction.

All ranks run it. The tuner sees only every other size; ``bench plans`` ends with the quality of its
choice on all sizes.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pgasdl.collectives.policy import Choice, Policy
from pgasdl.context import Context
from pgasdl.tools.bench.calibrate import Calibration, calibrate
from pgasdl.tools.bench.output import Output
from pgasdl.tools.bench.request import Request
from pgasdl.tools.bench.session import Session
from pgasdl.tools.bench.tuner import (
    TUNED,
    Figures,
    Size,
    choices_here,
    measure_all,
    predict_all,
    tune,
)


class PlanBench:
    """The measurements of one job. Every member is collective."""

    def __init__(self, context: Context, request: Request, output: Output) -> None:
        self.output, self.say = output, output.say
        self.context, self.request = context, request
        self.session = Session(context, output, rounds=request.rounds, seconds=request.seconds)

    def header(self) -> Calibration:
        """Measure and describe the machine."""
        self.session.header(self.request.command)
        figures = calibrate(self.session)
        for each in (figures.inside, figures.across):
            if each is not None:
                self.say(f"measured   {each}")
        return figures

    def tune(self) -> Policy:
        """Measure candidates, and write a policy."""
        calibration = self.header()
        self.say("figures    microseconds measured (predicted), the fastest first")

        def report(size: Size) -> None:
            self.say(str(size))

        policy, sizes = tune(self.session, calibration, self.request.sizes, report)
        self.say(f"policy     {policy}")
        file = self.request.policy_file
        if self.context.rank == 0 and file is not None:
            lines = [
                f"# pgasdl tune: {self.session.machine}",
                f"# {self.context.size} ranks, {self.context.topology.routes}",
                f"# {calibration.dump()}",
                str(policy),
            ]
            used = f"PGASDL_POLICY=@{file}"
            if modules := self.context.config.plan_modules:
                lines.insert(2, f"# plans of {modules}")
                used += f" PGASDL_PLAN_MODULES={modules}"
            Path(file).write_text("\n".join(lines) + "\n", encoding="utf-8")
            self.say(f"wrote      {file}: {used}")
        self.output.write(
            {
                "machine": self.session.machine,
                "ranks": self.context.size,
                "routes": str(self.context.topology.routes),
                "calibration": asdict(calibration),
                "sizes": [
                    {
                        "operation": size.operation,
                        "bytes": size.nbytes,
                        "plans": [
                            {"plan": str(choice), "us": us, "predicted_us": size.predicted[choice]}
                            for choice, us in size.measured.items()
                        ],
                    }
                    for size in sizes
                ],
                "policy": str(policy),
                "file": file,
            }
        )
        return policy

    def plans(self) -> None:
        """Measure every plan at every size."""
        request, context = self.request, self.context
        (operation,) = (each for each in TUNED if each.name == request.operation)
        calibration = self.header()
        seen = request.sizes[::2]
        policy, _ = tune(self.session, calibration, seen, lambda _: None, (operation,))
        self.say(f"policy     {policy}")
        choices = choices_here(context, operation.kind)
        rows: list[dict[str, Any]] = []
        for nbytes in request.sizes:
            chosen = policy.find(operation.name, nbytes)
            here = list(dict.fromkeys([*choices, *filter(None, [chosen])]))  # with its own options
            predicted = predict_all(context, calibration, here, nbytes, operation.kind)
            measured = measure_all(self.session, here, nbytes, operation)
            transport = "+".join(sorted(set(context.topology.routes.names)))
            rows += [
                {
                    "ranks": context.size,
                    "transport": transport,
                    "bytes": nbytes,
                    "plan": str(choice),
                    "us": us,
                    "predicted_us": predicted[choice],
                    "chosen": choice == chosen,  # by the tuner's policy
                    "tuned": nbytes in seen,
                }
                for choice, us in measured.items()
            ]
            self._say_size(nbytes, measured, predicted, chosen)
        self.output.write(rows)

    def _say_size(
        self, nbytes: int, measured: Figures, predicted: Figures, chosen: Choice | None
    ) -> None:
        self.say(f"{nbytes} bytes: us measured / predicted, * is the tuner's")
        for choice, us in sorted(measured.items(), key=lambda item: item[1]):
            mark = "*" if choice == chosen else " "
            self.say(f"  {mark} {choice!s:<28} {us:>11.2f} {predicted[choice]:>11.2f}")


def measure(context: Context, request: Request) -> None:
    """Run ``request.op``."""
    bench = PlanBench(
        context, request, Output(context.rank, as_json=request.as_json, file=request.rows_file)
    )
    if request.op == "tune":
        bench.tune()
    else:
        bench.plans()
