"""Training from a notebook, with parts that exist nowhere but there."""

from __future__ import annotations

import json

import nbformat
import pytest
from workspace import Workspace, summary

pytestmark = pytest.mark.timeout(300)

DEFINITIONS = """
import torch
import cordee

class Net(torch.nn.Module):
    def __init__(self, input_shape, num_classes, hidden):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(input_shape[0], hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, num_classes)
        )

    def forward(self, x):
        return self.layers(x)

def points():
    x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] * x[:, 1] > 0).long()

job = cordee.Job(
    model=cordee.Use(Net, hidden=32),
    data=cordee.Data(points, test_fraction=0.25),
    optimizer=cordee.Use(torch.optim.Adam, lr=0.02),
    loss=lambda outputs, targets: torch.nn.functional.cross_entropy(outputs, targets),
    training={"epochs": 20, "threads": 1},
)
torch.manual_seed(7)
expected = torch.rand(3)
torch.manual_seed(7)
"""
FIRST = "first = cordee.train(job, run_dir='first')"
SECOND = "second = cordee.train(job, run_dir='second', overrides=['training.epochs=10'])"
CHECKS = """
assert torch.equal(torch.rand(3), expected), "training changed the notebook's random numbers"
assert first.model(torch.tensor([[1.0, 1.0]])).argmax() == 1
assert first.test_accuracy > 0.85, first.test_accuracy
assert (first.summary.steps, second.summary.steps) == (200, 100)
print(first.summary.weights_sha256, second.status)
"""


def test_a_notebook_trains_twice_with_its_own_parts(workspace: Workspace) -> None:
    cells = [nbformat.v4.new_code_cell(source) for source in (DEFINITIONS, FIRST, SECOND, CHECKS)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbformat.write(notebook, workspace.path / "notebook.ipynb")
    # In a process of its own: nbclient leaves an event loop and sockets to the garbage collector.
    script = """
import nbformat, nbclient
notebook = nbformat.read("notebook.ipynb", as_version=4)
nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
nbformat.write(notebook, "executed.ipynb")
"""
    done = workspace.execute(["python", "-c", script])
    assert done.returncode == 0, done.stderr
    executed = json.loads((workspace.path / "executed.ipynb").read_text())
    outputs = [cell["outputs"] for cell in executed["cells"]]
    assert not [output for cell in outputs for output in cell if output["output_type"] == "error"]
    (printed,) = outputs[3]
    assert "".join(printed["text"]).split() == [summary(workspace.path / "first")["weights_sha256"], "completed"]
    shown = json.dumps(outputs[1])
    assert "test accuracy" in shown and "completed" in shown
    for name in ("first", "second"):
        assert summary(workspace.path / name)["status"] == "completed"
