"""Judges a convergence experiment: does FP8 differ from bf16 by more than bf16 runs do?

    python scripts/converge_verdict.py RESULTS

RESULTS is what converge.sh wrote. Arms are compared with the arm "bf16" at each evaluation after
warm-up; all evaluations read the same held-out text. An FP8 arm passes if (the larger of two
limits counts)

- its held-out loss differs by at most 0.25 % or what the noise of bf16 allows;
- its next-token accuracy differs by at most 0.25 points or what the noise allows;
- averaged over the last half of the steps, both differ by at most 0.25 or what the noise of the
  averages allows;
- in a MoE, the load of each expert differs by at most a tenth of a balanced share or twice the
  noise;
- the gap of its held-out loss has no trend over the last half of the steps;
- nothing is NaN or Inf;
- all evaluations are there, and its losses are not those of another arm, which would mean that
  nothing was converted.

The noise at an evaluation is the root mean square of the differences of all pairs of bf16 arms, at
that evaluation, the two before and the two after. An arm may differ by a multiple of it. The
multiple is chosen so that an arm that varies like bf16 exceeds it at one or more evaluations with a
probability of 5 %, for loss and for accuracy each (converge_stats.noise_factor). With fewer than
three bf16 arms the noise is not known, and the tolerances alone decide, except for the trend. A
bf16 arm with a NaN, without an evaluation, or equal to another arm fails and does not count.

A gap has a trend if it moves away from zero by the test of Mann and Kendall, one-sided, exact, at a
level of 5 %, and if it moves by more than a tenth of the tolerance and more than the gap of any two
bf16 arms does. The second condition is needed because the test assumes independent evaluations, and
successive ones are not: the gaps of two bf16 runs drift as well. docs/convergence.md has the
reasons and sources.

The control must differ, or the experiment cannot detect a difference. NaN is no difference. The
arms bf16_ulp and bf16_rounding are judged like FP8, by the noise of the other bf16 arms, or by the
tolerances if there are fewer than three others. If one differs, more bf16 arms are needed to know
the noise. If three or more bf16 arms read the text in the order of "bf16", a note says whether an
FP8 arm differs by more than the noise of these arms. The arms bf16_errors and bf16_errors_ulp, with
random errors as large as those of FP8, are judged like FP8 but may differ. A resumed arm must have
been killed and is compared with the arm that it repeats.

The tables are printed and written to RESULTS/verdict.md, the plots to verdict.png. Exit status: 0
if every arm has its expected result, 1 if not, 2 if the results cannot be read.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import converge_plot
import numpy as np
from compare_loss import compare
from converge_arms import ARMS, BASELINE, Settings, read_settings
from converge_judge import FEWEST_ARMS, ArmRun, Judgment, judge
from converge_stats import HELD_OUT, Differences, read_held_out
from tables import Row, markdown_table, text_table
from titan_logs import InputError, read_run


def read_arms(results: Path, settings: Settings) -> dict[str, ArmRun]:
    """The arms that have evaluations.

    Raises:
        InputError: the baseline has none, an arm has no TensorBoard events or other experts than
            the baseline, or a folder with evaluations has the name of no arm.
    """
    for file in sorted(results.glob(f"*/{HELD_OUT}")):
        if file.parent.name not in ARMS:
            raise InputError(f"{file.parent} is no arm: allowed are {', '.join(ARMS)}")
    found = {name: held_out for name in ARMS if (held_out := read_held_out(results / name))}
    if BASELINE not in found:
        raise InputError(f"{results} has no evaluation of the arm {BASELINE!r}")
    for name, held_out in found.items():
        shapes = {each.load.shape for each in (*held_out.values(), *found[BASELINE].values())}
        if len(shapes) > 1:
            raise InputError(f"{results / name} has other experts than {BASELINE!r}: {shapes}")
    arms = {
        name: ArmRun(
            name, read_run(results / name, name), held_out, (results / name / "killed").exists()
        )
        for name, held_out in found.items()
    }
    whole = [each for each in arms.values() if not any(each.incomplete(settings))]
    for first, second in combinations(whole, 2):
        # Arms that ended early say too little: at the first steps arms may be equal.
        if second.arm.role != "resumed" and any(second.has_losses_of(first)):
            second.equal_to = second.equal_to or first.name
    return arms


def bf16_arms(arms: dict[str, ArmRun]) -> list[ArmRun]:
    return [each for each in arms.values() if each.arm.role in ("baseline", "bf16")]


def judgments(arms: dict[str, ArmRun], settings: Settings) -> Iterator[Judgment]:
    bf16 = bf16_arms(arms)
    for name, each in arms.items():
        role, twin = each.arm.role, each.arm.twin
        if role in ("fp8", "errors", "control"):
            yield judge(each, arms[BASELINE], bf16, settings)
        elif role == "bf16" and not each.arm.reordered and not any(each.faults(settings)):
            others = [other for other in bf16 if other is not each]
            yield judge(each, arms[BASELINE], others, settings)
        elif role == "resumed":
            if twin not in arms:
                raise InputError(f"{name} has no twin: the arm {twin!r} has no evaluation")
            yield judge(each, arms[twin], bf16, settings)


def same_order(arms: dict[str, ArmRun], settings: Settings) -> Iterator[str]:
    """Notes that judge arms by the noise of the bf16 arms with the same order of the text.

    They judge FP8 arms and those with random errors. There are none with fewer than FEWEST_ARMS
    such bf16 arms, or if every bf16 arm has this order.
    """
    bf16 = [each for each in bf16_arms(arms) if not any(each.faults(settings))]
    same = [each for each in bf16 if not each.arm.reordered]
    if FEWEST_ARMS <= len(same) < len(bf16):
        for name, each in arms.items():
            if each.arm.role in ("fp8", "errors"):
                judged = judge(each, arms[BASELINE], same, settings)
                found = "; ".join(judged.faults) or "no difference"
                if not judged.unjudged:
                    yield f"note  {name}, by the noise of bf16 arms with the same order: {found}"


def training_losses(arms: dict[str, ArmRun], settings: Settings) -> Iterator[str]:
    """A note on training losses, which vary less than held-out losses if the batches are the same.

    They are averaged over the logged steps of the last half. Arms whose log ends early are left
    out.
    """
    base, last = arms[BASELINE].run, settings.steps // 2
    gaps = [
        f"{name} {compare(base, each.run, last).decisive:+.3f} %"
        for name, each in arms.items()
        if name != BASELINE and not each.arm.reordered and each.logged_all(settings)
    ]
    if gaps and arms[BASELINE].logged_all(settings):
        yield f"training loss over the last half against {BASELINE}'s: {', '.join(gaps)}"


def summary(judged: list[Judgment]) -> list[Row]:
    """One row for each arm, with each quantity where it is worst."""
    columns = dict.fromkeys(str(measure) for each in judged for measure in each.measures)
    columns |= dict.fromkeys(str(average) for each in judged for average in each.averages)
    rows = []
    for each in judged:
        row: Row = {"arm": each.run.name, "against": each.reference.name} | columns
        for measure in each.measures:
            at = measure.worst()
            row[str(measure)] = f"{measure.values[at]:+.3f} of {measure.bars[at]:.3f}"
        for average in each.averages:
            row[str(average)] = f"{average.value:+.3f} of {average.allowed:.3f}"
        row["drift, %"] = f"{each.trend.drift:+.3f} of {each.trend.allowed:.3f}"
        row["p of the trend"] = each.trend.p
        row["verdict"] = "not judged" if each.unjudged else "differs" if each.faults else "equal"
        rows.append(row)
    return rows


def by_step(arms: dict[str, ArmRun], judged: list[Judgment]) -> list[Row]:
    """At each evaluation: the baseline's held-out loss, and the gaps of the other arms to it."""
    base = arms[BASELINE].held_out
    widest = converge_plot.with_bars(judged)
    bars = dict(zip(widest.steps.tolist(), widest.measures[0].bars)) if widest.measures else {}
    rows: list[Row] = []
    for step in sorted(base):
        row: Row = {"step": step, "bf16": f"{base[step].loss:.5f}"}
        row["allowed, %"] = f"{bars[step]:.3f}" if step in bars else None
        for name, each in arms.items():
            if name != BASELINE:
                row[f"{name}, %"] = None
                if step in each.held_out:
                    gap = Differences(each.held_out, base, np.array([step])).loss[0]
                    row[f"{name}, %"] = f"{gap:+.3f}"
        rows.append(row)
    return rows


def notes(
    results: Path, arms: dict[str, ArmRun], judged: list[Judgment], settings: Settings
) -> Iterator[str]:
    tokens = settings.tokens * settings.steps / 1e6
    yield f"{settings.model}, {settings.steps} steps, {tokens:.1f} million tokens an arm"
    for name in arms:
        log = results / name / "train.log"
        if log.exists() and "is being re-looped" in log.read_text(errors="replace"):
            yield f"{name} read some text more than once"
    if not any(each.arm.role == "control" for each in arms.values()):
        yield "without the control nothing shows that the verdict sees a difference"
    if any(not (each.knows_noise() or each.run.arm.role == "bf16") for each in judged):
        yield f"with fewer than {FEWEST_ARMS} bf16 arms the tolerances alone decide"


def report(results: Path) -> bool:
    """Prints, writes and draws the verdict; returns whether all is as it must be."""
    settings = read_settings(results)
    if settings is None:
        raise InputError(f"{results} has no experiment: converge.sh makes one")
    arms = read_arms(results, settings)
    judged = list(judgments(arms, settings))
    lines = list(notes(results, arms, judged, settings))
    missing = [name for name in ARMS if (results / name).is_dir() and name not in arms]
    lines += [f"FAIL  {name}: no evaluation" for name in missing]
    passed = not missing
    for each in bf16_arms(arms):
        faults = list(each.faults(settings))
        lines += [f"FAIL  {each.name}: {fault}" for fault in faults]
        passed = passed and not faults
    if not judged and passed:
        raise InputError(f"{results} has only bf16 arms: nothing to judge")
    for each in judged:
        lines.append(f"{each.mark()}  {each.run.name}: {each.finding()}")
        passed = passed and each.passes()
    lines += [*same_order(arms, settings), *training_losses(arms, settings)]
    tables = [by_step(arms, judged), summary(judged)] if judged else []
    print(*map(text_table, tables), "\n".join(lines), sep="\n\n")
    listed = "\n".join(f"- {line}" for line in lines)
    (results / "verdict.md").write_text("\n\n".join([*map(markdown_table, tables), listed]) + "\n")
    if judged:
        converge_plot.draw(arms, judged, results / "verdict.png")
    return passed


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("results", type=Path, metavar="RESULTS")
    results = parser.parse_args(argv).results
    try:
        return 0 if report(results) else 1
    except (InputError, OSError) as error:
        print(f"converge_verdict: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
