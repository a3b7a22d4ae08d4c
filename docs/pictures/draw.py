"""Draws the pictures of the concept pages: `python docs/pictures/draw.py` writes them beside this file."""

from __future__ import annotations

from pathlib import Path

from shapes import Picture

FOLDER = Path(__file__).parent


def three_questions() -> Picture:
    p = Picture(
        "three-questions", 960, 330, "The three questions, for two workers",
        "A table with a column for each of six strategies. single: one worker has all data and all parameters. "
        "data_parallel: half of the batch each, all parameters each, gradients are summed in every step. "
        "sharded: half of the batch each, half of the parameters each, gradients are summed and cut. parameter_server: "
        "half of the batch each, parameters on a server, pushes and pulls. pipeline: the same batch, some layers each, "
        "activations pass on. tensor: the same batch, half of each layer each, partial results are summed.",
    )  # fmt: skip
    names = ("single", "data_parallel", "sharded", "parameter_server", "pipeline", "tensor")
    for y, words in ((75, "who has which"), (160, "who has which"), (270, "when do they")):
        p.text(16, y, words)
    for y, words in ((93, "data"), (178, "parameters"), (288, "agree")):
        p.text(16, y, words, style="head")
    for number, name in enumerate(names):
        x = 130 + 138 * number
        p.text(x + 60, 36, name, anchor="middle", style="head")
        if name == "single":
            p.box(x + 30, 60, 60, 44, "all", "blue")
            p.box(x + 30, 130, 60, 70, "all", "green")
        elif name in ("pipeline", "tensor"):
            p.box(x, 60, 120, 44, "the same", "blue")
        else:
            p.box(x, 60, 58, 44, "half", "blue")
            p.box(x + 62, 60, 58, 44, "half", "blue")
        if name == "data_parallel":
            p.box(x, 130, 58, 70, "all", "green")
            p.box(x + 62, 130, 58, 70, "all", "green")
        elif name == "sharded":
            p.box(x, 130, 58, 35, "½", "green")
            p.box(x + 62, 165, 58, 35, "½", "green")
        elif name == "parameter_server":
            p.box(x + 10, 130, 100, 70, "all, on\na server", "yellow")
        elif name == "pipeline":
            p.box(x, 130, 120, 32, "layers 1 … 4", "green", s="small")
            p.box(x, 168, 120, 32, "layers 5 … 8", "green", s="small")
        elif name == "tensor":
            p.box(x, 130, 58, 70, "½ of\neach", "green", s="small")
            p.box(x + 62, 130, 58, 70, "½ of\neach", "green", s="small")
    agreed = (
        ("–",), ("gradients are", "summed,", "every step"), ("gradients are", "summed and cut,", "every step"),
        ("at each push:", "synchronous", "or not"), ("activations pass", "from stage", "to stage"),
        ("partial results", "are summed,", "in each layer"),
    )  # fmt: skip
    for number, lines in enumerate(agreed):
        for row, words in enumerate(lines):
            p.text(190 + 138 * number, 262 + 18 * row, words, anchor="middle", style="small")
    for y in (48, 117, 225):
        p.line((16, y), (944, y))
    return p


def data_parallel() -> Picture:
    p = Picture(
        "data-parallel", 860, 250, "A step of data_parallel with two workers",
        "A batch of 64 samples is cut into two shares of 32. Each worker has a full copy of the model and computes the "
        "gradient of its share. The gradients are summed, weighted by samples, and both workers take the same step.",
    )  # fmt: skip
    p.box(20, 85, 110, 70, "global batch\n64 samples", "blue")
    for y, number in ((40, 0), (150, 1)):
        p.box(190, y, 130, 50, "32 samples", "blue")
        p.box(370, y, 140, 50, f"worker {number}\nwhole model", "green")
        p.arrow((130, 120), (160, 120), (160, y + 25), (190, y + 25))
        p.arrow((320, y + 25), (370, y + 25))
        p.line((510, y + 25), (535, y + 25), (535, 120))
        p.box(730, y, 110, 50, "the same\nstep", "green")
        p.arrow((690, 120), (712, 120), (712, y + 25), (730, y + 25))
    p.arrow((535, 120), (560, 120))
    p.box(560, 85, 130, 70, "all-reduce:\nsum of gradients", "yellow", s="small")
    p.text(430, 230, "Each share counts by its samples: the result is that of one worker with 64.", anchor="middle")
    return p


def generations() -> Picture:
    p = Picture(
        "generations", 900, 290, "Three generations of one run",
        "A line for each of three workers over time. Generation 1 has the workers 0, 1 and 2. Worker 1 is killed in "
        "step 40. Workers 0 and 2 form generation 2 in the same processes, and take step 40 again. A replacement of "
        "worker 1 loads its data meanwhile, and gets the state when generation 3 is formed, after step 72.",
    )  # fmt: skip
    for x, width, words in (
        (110, 250, "generation 1: 0, 1, 2"), (370, 250, "generation 2: 0, 2"), (630, 250, "generation 3: 0, 1, 2"),
    ):  # fmt: skip
        p.text(x + width / 2, 32, words, anchor="middle", style="head")
    for row in range(3):
        y = 50 + 60 * row
        p.text(16, y + 26, f"worker {row}")
        if row == 1:
            p.box(110, y, 190, 40, "steps 1 … 39", "green")
            p.box(304, y, 56, 40, "killed", "red", s="small")
            p.box(480, y, 140, 40, "starts, loads data", "grey", s="small")
            p.box(630, y, 250, 40, "gets the state; steps 73 …", "green", s="small")
        else:
            p.box(110, y, 250, 40, "steps 1 … 39, part of 40", "green")
            p.box(370, y, 250, 40, "steps 40 … 72", "green")
            p.box(630, y, 250, 40, "steps 73 …", "green")
    p.line((365, 44), (365, 232), style="gone")
    p.line((625, 44), (625, 232), style="gone")
    p.text(365, 252, "step 40 is dropped, a new group is formed", anchor="middle", style="small")
    p.text(365, 270, "in the living processes; step 40 is taken again", anchor="middle", style="small")
    p.text(760, 252, "all halt after a step; worker 1 gets weights,", anchor="middle", style="small")
    p.text(760, 270, "optimizer state and place by message", anchor="middle", style="small")
    return p


def hand_over() -> Picture:
    p = Picture(
        "hand-over", 880, 300, "Who owns the state while a member joins",
        "Member 0 keeps the state with which it entered the generation until the next generation is entered. It sends "
        "the state to the newcomer in pieces. The newcomer owns its state only when the last byte has come and the "
        "digests are equal. Whoever dies before that moment, the members that had the state still have it.",
    )  # fmt: skip
    p.text(16, 78, "member 0")
    p.text(16, 198, "newcomer")
    p.box(110, 50, 740, 44, "owns weights, optimizer, place in the data", "green")
    p.box(110, 170, 120, 44, "owns nothing", "grey", s="small")
    p.box(240, 170, 290, 44, "receives: what has come does not count", "yellow", s="small")
    p.box(540, 170, 110, 44, "compares", "yellow", s="small")
    p.box(660, 170, 190, 44, "owns the same state", "green", s="small")
    for x in (270, 345, 420, 495):
        p.arrow((x, 94), (x, 170))
    p.text(550, 138, "digest", style="small")
    p.arrow((595, 94), (595, 170))
    p.line((655, 40), (655, 225), style="gone")
    p.text(655, 28, "the next generation is entered", anchor="middle", style="small")
    p.text(380, 248, "newcomer dies here: nothing is lost", anchor="middle", style="small")
    p.text(380, 268, "member 0 dies here: another old member sends, or the checkpoint", anchor="middle", style="small")
    p.text(755, 248, "from here on each of", anchor="middle", style="small")
    p.text(755, 268, "them can be lost", anchor="middle", style="small")
    return p


def staleness() -> Picture:
    p = Picture(
        "staleness", 900, 430, "How far apart workers may be",
        "Time lines of a fast and a slow worker under three settings. With staleness 0 the fast worker waits at "
        "the end of each step. With staleness 2 it takes steps ahead, and waits when it is two steps ahead. "
        "With unbounded staleness it never waits.",
    )  # fmt: skip
    unit, slow = 60.0, 150.0
    for row, (bound, words) in enumerate(
        ((0, "staleness = 0: synchronous"), (2, "staleness = 2: bounded"), (99, 'staleness = "unbounded"'))
    ):
        y = 20 + 135 * row
        p.text(16, y + 14, words, style="head")
        p.text(16, y + 46, "fast worker", style="small")
        p.text(16, y + 86, "slow worker", style="small")
        for step in range(5):
            p.box(110 + slow * step, y + 66, slow - 4, 30, f"step {step + 1}", "blue", s="small")
        time, step = 0.0, 0
        while time < 5 * slow - 1:
            ready = slow * max(0, step - bound)
            if ready > time:
                p.box(110 + time, y + 26, min(ready, 5 * slow) - time - 4, 30, "waits", "grey", s="small")
                time = ready
                continue
            if time + unit > 5 * slow + 1:
                break
            p.box(110 + time, y + 26, unit - 4, 30, f"step {step + 1}", "green", s="small")
            time, step = time + unit, step + 1
    p.text(110, 422, "time →", style="small")
    return p


def servers() -> Picture:
    p = Picture(
        "parameter-servers", 880, 330, "The processes of a parameter_server run",
        "The coordinator hands out units of work to four workers. Workers push gradients to two servers and pull "
        "parameters. Each server has half of the parameters, with their optimizer state, and a follower that applies "
        "each push before it is acknowledged. An evaluator reads snapshots of the servers, and saves them.",
    )  # fmt: skip
    p.box(20, 40, 150, 50, "coordinator", "purple")
    p.line((170, 65), (230, 65), (230, 20), (800, 20))
    p.text(120, 25, "units of work", style="small")
    for number in range(4):
        x = 290 + 150 * number
        p.box(x, 40, 120, 50, f"worker {number}", "green")
        p.arrow((x + 60, 20), (x + 60, 40))
        p.arrow((x + 40, 90), (x + 40, 115))
        p.arrow((x + 80, 115), (x + 80, 90))
    p.box(290, 115, 570, 28, "gradients are pushed ↓   parameters are pulled ↑", s="small")
    for x, number in ((350, 0), (590, 1)):
        p.arrow((x + 60, 143), (x + 60, 170))
        p.arrow((x + 120, 170), (x + 120, 143))
        p.box(x, 170, 180, 54, f"server {number}\nslice {number}, optimizer state", "yellow", s="small")
        p.arrow((x + 90, 224), (x + 90, 262))
        p.box(x, 262, 180, 44, f"follower {number} (replicas = 2)", "plain", s="small")
    p.box(20, 172, 170, 50, "evaluator", "purple")
    p.arrow((350, 197), (190, 197))
    p.text(270, 188, "snapshots", anchor="middle", style="small")
    p.text(105, 245, "test loss, checkpoints", anchor="middle", style="small")
    return p


def bubbles() -> Picture:
    p = Picture(
        "bubbles", 900, 400, "Bubbles of a pipeline with three stages and four micro-batches",
        "Two schedules. In both, stages wait at the beginning and at the end, because a micro-batch passes the stages "
        "one after the other. With gpipe all forward passes come first, so each stage keeps the activations of four "
        "micro-batches. With 1f1b a stage alternates forward and backward passes, and the first stage keeps at most "
        "three.",
    )  # fmt: skip
    unit = 36.0
    for row, schedule in enumerate(("gpipe", "1f1b")):
        y = 26 + 185 * row
        p.text(16, y + 8, schedule, style="head")
        placed = _schedule(schedule, num_stages=3, num_microbatches=4)
        end = max(start + length for passes in placed for start, length, _ in passes)
        for stage, passes in enumerate(placed):
            top = y + 20 + 44 * stage
            p.text(16, top + 23, f"stage {stage}", style="small")
            p.box(80, top, unit * end, 36, "", "grey")
            for start, length, name in passes:
                color = "blue" if name.startswith("F") else "green"
                p.box(80 + unit * start, top, unit * length, 36, name, color, s="small")
    p.text(80, 392, "F: forward, B: backward (twice as long), grey: the bubble", style="small")
    return p


def _schedule(name: str, *, num_stages: int, num_microbatches: int) -> list[list[tuple[int, int, str]]]:
    """Return (start, length, name) of the passes of each stage, each as early as its order and its inputs allow."""
    orders = []
    for stage in range(num_stages):
        ahead = num_microbatches if name == "gpipe" else min(num_stages - stage, num_microbatches)
        order = [f"F{m}" for m in range(ahead)]
        for m in range(num_microbatches):
            order.append(f"B{m}")
            if ahead + m < num_microbatches:
                order.append(f"F{ahead + m}")
        orders.append(order)
    ended: dict[tuple[int, str], int] = {}
    placed: list[list[tuple[int, int, str]]] = [[] for _ in range(num_stages)]
    free = [0] * num_stages
    while any(orders):
        for stage, order in enumerate(orders):
            if not order:
                continue
            one = order[0]
            before = (stage - 1, one) if one[0] == "F" else (stage + 1, one)
            if one[0] == "B" and stage == num_stages - 1:
                before = (stage, "F" + one[1:])
            is_first = one[0] == "F" and stage == 0
            if not is_first and before not in ended:
                continue
            start, length = max(free[stage], 0 if is_first else ended[before]), 1 if one[0] == "F" else 2
            placed[stage].append((start, length, one))
            free[stage] = ended[stage, one] = start + length
            order.pop(0)
    return placed


def sharding() -> Picture:
    p = Picture(
        "sharding", 900, 290, "What two workers of sharded hold during a step",
        "Each worker holds one half of every unit of the model all the time. When a unit is used in the forward or "
        "backward pass, the halves are gathered, and freed again afterwards. In the backward pass gradients are summed "
        "and cut: each worker keeps the half that belongs to its parameters.",
    )  # fmt: skip
    p.text(16, 30, "unit", style="head")
    p.text(140, 30, "kept all the time", style="head")
    p.text(415, 30, "forward", style="head")
    p.text(665, 30, "backward", style="head")
    for row, unit in enumerate("ABC"):
        y = 50 + 58 * row
        p.text(24, y + 26, unit)
        p.box(80, y, 110, 40, "worker 0: ½", "green", s="small")
        p.box(200, y, 110, 40, "worker 1: ½", "green", s="small")
        p.box(360 + 62 * row, y, 58, 40, "whole", "yellow", s="small")
        x = 590 + 90 * (2 - row)
        p.box(x, y, 58, 40, "whole", "yellow", s="small")
        p.arrow((x + 58, y + 20), (x + 80, y + 20))
        p.text(x + 84, y + 25, "½ g", style="small")
    p.line((335, 44), (335, 222), style="gone")
    p.line((565, 44), (565, 222), style="gone")
    p.text(195, 250, "parameters, gradients,", anchor="middle", style="small")
    p.text(195, 268, "optimizer state", anchor="middle", style="small")
    p.text(450, 250, "gathered on use,", anchor="middle", style="small")
    p.text(450, 268, "freed after it", anchor="middle", style="small")
    p.text(735, 250, "gathered again; gradients are summed,", anchor="middle", style="small")
    p.text(735, 268, "and each worker keeps its half (½ g)", anchor="middle", style="small")
    return p


def slices() -> Picture:
    p = Picture(
        "slices-and-meshes", 900, 320, "Slices of layers, and a mesh of workers",
        "Left: two linear layers are split over two workers. The first is split by its outputs (column), the second by "
        "its inputs (row). One sum at the end gives both workers the whole result. Right: a mesh of data 2 and "
        "pipeline 2 has four workers: two copies of the model, each of two stages.",
    )  # fmt: skip
    p.text(20, 30, "tensor: one exchange for two layers", style="head")
    p.box(20, 120, 80, 60, "same\nbatch", "blue", s="small")
    for y, worker in ((60, 0), (180, 1)):
        p.text(150, y - 6, f"worker {worker}", style="small")
        p.arrow((100, 150), (120, 150), (120, y + 30), (140, y + 30))
        p.box(140, y, 100, 60, "layer 1\n½ of outputs", "green", s="small")
        p.arrow((240, y + 30), (265, y + 30))
        p.box(265, y, 100, 60, "layer 2\n½ of inputs", "green", s="small")
        p.arrow((365, y + 30), (400, y + 30), (400, 150), (420, 150))
    p.box(420, 120, 80, 60, "sum", "yellow", s="small")
    p.text(250, 290, "Between the layers each worker has its half.", anchor="middle", style="small")
    p.line((525, 20), (525, 300), style="gone")
    p.text(550, 30, "hybrid: mesh = { data = 2, pipeline = 2 }", style="head")
    for row in range(2):
        y = 70 + 110 * row
        p.text(550, y + 35, f"copy {row}", style="small")
        for stage in range(2):
            p.box(610 + 150 * stage, y, 110, 60, f"worker {2 * row + stage}\nstage {stage}", "green", s="small")
        p.arrow((720, y + 30), (760, y + 30))
    for x in (665, 815):
        p.line((x, 130), (x, 180))
    p.text(740, 160, "gradients", anchor="middle", style="small")
    p.text(712, 290, "Copies compute different samples, sum gradients.", anchor="middle", style="small")
    return p


def reproducibility() -> Picture:
    p = Picture(
        "reproducibility", 900, 330, "One tree of sums, whoever computes its leaves",
        "A batch is cut into eight logical shards. Their gradients are added in one fixed tree: 0 with 1, 2 with 3, "
        "then the pairs. Below, the same eight shards are computed by one worker, by three workers (three, three and "
        "two shards) or by four workers (two each). The tree, and so the result, stays the same.",
    )  # fmt: skip
    width = 92
    xs: list[float] = [120 + width * shard for shard in range(8)]
    for shard, x in enumerate(xs):
        p.box(x, 170, width - 12, 34, f"shard {shard}", "blue", s="small")
    tops: list[float] = [x + (width - 12) / 2 for x in xs]
    y = 170.0
    while len(tops) > 1:
        middles = []
        for left, right in zip(tops[::2], tops[1::2], strict=True):
            middle = (left + right) / 2
            p.line((left, y), (left, y - 14), (right, y - 14), (right, y))
            p.line((middle, y - 14), (middle, y - 26))
            p.box(middle - 14, y - 50, 28, 24, "+", "yellow", s="small")
            middles.append(middle)
        tops, y = middles, y - 50
    p.text(16, 192, "a batch")
    p.text(16, 40, "one sum", style="head")
    for row, split in enumerate(((8,), (3, 3, 2), (2, 2, 2, 2))):
        top, start = 222 + 34 * row, 0
        p.text(16, top + 19, f"{len(split)} worker{'s' if len(split) > 1 else ''}", style="small")
        for worker, count in enumerate(split):
            p.box(xs[start], top, width * count - 12, 26, f"worker {worker}", "green", s="small")
            start += count
    return p


def planner() -> Picture:
    p = Picture(
        "planner", 900, 260, "From a job to a choice",
        "The job is profiled on real batches, and the machine is measured: several processes at once, exchanges, "
        "overheads. A cost model predicts the time and memory of a step for each strategy and number of workers. A "
        "search ranks them. The plan names the choice, the runner-up and the reasons. After the run the prediction is "
        "compared with the measured step.",
    )  # fmt: skip
    p.box(20, 40, 170, 60, "profile of the model\nreal batches, blocks", "blue", s="small")
    p.box(20, 150, 170, 60, "measured machine\ncores, exchanges", "blue", s="small")
    p.line((190, 70), (215, 70), (215, 180), (190, 180))
    p.arrow((215, 125), (240, 125))
    p.box(240, 90, 170, 70, "cost model\ntime and memory of\neach strategy", "yellow", s="small")
    p.arrow((410, 125), (440, 125))
    p.box(440, 90, 170, 70, "search\nworkers, micro-batches,\nmeshes", "yellow", s="small")
    p.arrow((610, 125), (640, 125))
    p.box(640, 90, 120, 70, "plan\nchoice, reasons", "green", s="small")
    p.arrow((760, 125), (790, 125))
    p.box(790, 90, 90, 70, "run\nmeasured", "green", s="small")
    p.line((835, 160), (835, 210), (700, 210))
    p.arrow((700, 210), (700, 160))
    p.text(768, 230, "predicted beside measured", anchor="middle", style="small")
    return p


def processes() -> Picture:
    p = Picture(
        "processes", 900, 350, "The processes of a run, and what connects them",
        "The launcher starts a coordinator and, through a fork server, the workers of its host. Agents start workers "
        "on other hosts. All members have an encrypted channel to the coordinator. Workers of one host exchange "
        "tensors through shared memory. Between hosts one leader of each host exchanges over encrypted connections.",
    )  # fmt: skip
    p.text(30, 34, "host A", style="head")
    p.box(20, 44, 560, 286, "", "plain")
    p.text(670, 34, "host B", style="head")
    p.box(660, 44, 220, 286, "", "plain")
    p.box(40, 64, 150, 54, "launcher\nshows, records", "purple", s="small")
    p.box(40, 254, 150, 54, "fork server\nhas torch imported", "grey", s="small")
    p.arrow((115, 118), (115, 254))
    p.text(122, 190, "socket pair", style="small")
    p.box(380, 64, 180, 54, "coordinator\nmembers, journal", "purple", s="small")
    p.arrow((190, 91), (380, 91))
    p.text(285, 84, "encrypted channel", anchor="middle", style="small")
    p.box(260, 230, 120, 54, "worker 0", "green")
    p.box(440, 230, 120, 54, "worker 1", "green")
    p.box(300, 300, 220, 22, "shared memory", "yellow", s="small")
    p.line((320, 284), (320, 300))
    p.line((500, 284), (500, 300))
    p.arrow((190, 270), (260, 270))
    p.text(225, 262, "forks", anchor="middle", style="small")
    p.line((320, 230), (320, 170), (670, 170), (670, 245), (700, 245))
    p.line((500, 230), (500, 170))
    p.arrow((470, 170), (470, 118))
    p.text(478, 150, "heartbeats", style="small")
    p.box(700, 124, 140, 50, "agent", "grey")
    p.box(700, 230, 140, 54, "worker 2", "green")
    p.arrow((770, 174), (770, 230))
    p.arrow((560, 265), (700, 265))
    p.arrow((700, 265), (560, 265))
    p.text(622, 214, "tensors,", anchor="middle", style="small")
    p.text(622, 232, "encrypted", anchor="middle", style="small")
    return p


def windows() -> Picture:
    p = Picture(
        "windows", 900, 250, "local_sgd: windows of steps alone, then one agreement",
        "Two workers train alone for sync_every steps. Then they exchange the differences of their parameters, take "
        "the mean, and an outer optimizer makes one step of it. Both continue from the same parameters.",
    )  # fmt: skip
    for row in range(2):
        y = 50 + 80 * row
        p.text(16, y + 26, f"worker {row}")
        for window in range(2):
            x = 100 + 400 * window
            for step, words in enumerate(("step 1", "step 2", "…", "step 50")):
                p.box(x + 62 * step, y, 56, 40, words, "blue", s="small")
    for x in (356, 756):
        p.box(x, 50, 120, 120, "agree:\nmean of the\ndifferences,\nouter step", "yellow", s="small")
    p.text(221, 38, "sync_every = 50 steps, no exchange", anchor="middle", style="small")
    p.text(621, 38, "the next window, from the same parameters", anchor="middle", style="small")
    p.text(416, 200, "one exchange for 50 steps,", anchor="middle", style="small")
    p.text(416, 218, "which can be compressed", anchor="middle", style="small")
    return p


def checkpoint() -> Picture:
    p = Picture(
        "checkpoint", 900, 240, "A checkpoint is complete or not there",
        "Training stands still while the state is copied. A thread writes the files into a temporary folder, then the "
        "manifest with the digest of each file, and syncs all of them. "
        "Then the folder gets its name, and the parent folder is synced. A "
        "process that is killed before the renaming leaves the older checkpoints complete, and a temporary folder that "
        "the next save removes. After the renaming the new checkpoint is complete.",
    )  # fmt: skip
    steps = (
        ("copy the state\n(training waits)", "blue"), ("write the files to\na temporary folder", "plain"),
        ("write manifest.json\nsync to the disk", "plain"), ("rename the folder\nto step-200", "yellow"),
        ("sync the parent\nacknowledge", "green"),
    )  # fmt: skip
    for number, (words, color) in enumerate(steps):
        x = 20 + 175 * number
        p.box(x, 70, 150, 64, words, color, s="small")
        if number:
            p.arrow((x - 25, 102), (x, 102))
    p.line((20, 160), (690, 160))
    p.text(355, 182, "killed here: the older checkpoints are complete,", anchor="middle", style="small")
    p.text(355, 200, "the next save removes the temporary folder", anchor="middle", style="small")
    p.line((705, 160), (870, 160))
    p.text(788, 182, "from here on step-200", anchor="middle", style="small")
    p.text(788, 200, "is complete", anchor="middle", style="small")
    p.text(195, 52, "training continues from here on", style="small")
    return p


PICTURES = (
    three_questions, data_parallel, generations, hand_over, staleness, servers, bubbles, sharding, slices,
    reproducibility, planner, processes, windows, checkpoint,
)  # fmt: skip


def main() -> None:
    for draw in PICTURES:
        picture = draw()
        (FOLDER / f"{picture.name}.svg").write_text(picture.content())


if __name__ == "__main__":
    main()
