"""The manifests of examples/cluster: right by their schemas, and what `recognise` needs is in them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cordee.core.launchers import recognise

yaml = pytest.importorskip("yaml")

EXAMPLES = Path(__file__).parents[2] / "examples" / "cluster"
KUBERNETES_VERSION = "1.34"


def load(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def variables(container: dict[str, Any]) -> dict[str, str]:
    """Return what a pod has in its environment; what Kubernetes fills in is not empty."""
    return {entry["name"]: entry.get("value", "filled-in") for entry in container["env"]}


def test_the_indexed_job_fits_the_schemas_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install 'cordee[manifests]'")
    for document in load("kubernetes/indexed-job.yaml"):
        validate.validate(document, KUBERNETES_VERSION, strict=True)
    broken = load("kubernetes/indexed-job.yaml")[1]
    broken["spec"]["completionmode"] = broken["spec"].pop("completionMode")
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, KUBERNETES_VERSION, strict=True)


@pytest.mark.skipif("CORDEE_TEST_CRD" not in os.environ, reason="CORDEE_TEST_CRD: file with the CRD of TrainJob")
def test_the_train_job_fits_its_own_definition() -> None:
    """The definition is trainer.kubeflow.org_trainjobs.yaml in the sources of Kubeflow Trainer."""
    jsonschema = pytest.importorskip("jsonschema")
    definition = yaml.safe_load(Path(os.environ["CORDEE_TEST_CRD"]).read_text())
    (document,) = load("kubernetes/kubeflow-trainjob.yaml")
    group, _, version = document["apiVersion"].partition("/")
    assert group == definition["spec"]["group"]
    (schema,) = [
        entry["schema"]["openAPIV3Schema"] for entry in definition["spec"]["versions"] if entry["name"] == version
    ]
    jsonschema.validate(document, closed(schema))


def closed(schema: Any) -> Any:
    """Return the schema with fields that it does not list forbidden, as `kubectl apply` has it."""
    if isinstance(schema, dict):
        inner = {key: closed(value) for key, value in schema.items()}
        if "properties" in schema and isinstance(schema["properties"], dict) and schema["properties"]:
            inner.setdefault("additionalProperties", False)
        return inner
    return [closed(value) for value in schema] if isinstance(schema, list) else schema


def test_pods_of_the_indexed_job_are_recognised() -> None:
    service, job = load("kubernetes/indexed-job.yaml")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    environment = variables(pod["containers"][0]) | {"JOB_COMPLETION_INDEX": "1"}
    task = recognise(environment, host="digits-1")
    assert task.describe() == "Kubernetes, 2 hosts × 1 task, this is host digits-1"
    assert task.world_size == spec["completions"] == spec["parallelism"]
    assert task.first_host == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert task.job_id and environment["CORDEE_SECRET"]


def test_the_train_job_starts_as_many_workers_as_processes() -> None:
    (document,) = load("kubernetes/kubeflow-trainjob.yaml")
    trainer = document["spec"]["trainer"]
    workers = int(trainer["command"][trainer["command"].index("--workers") + 1])
    assert workers == trainer["numNodes"] * trainer["numProcPerNode"]
    assert {"CORDEE_SECRET", "CORDEE_JOB_ID"} <= variables(trainer).keys()


def test_containers_of_the_compose_file_are_recognised() -> None:
    (document,) = load("docker/compose.yaml")
    tasks = [recognise(service["environment"], host=name) for name, service in document["services"].items()]
    assert sorted(task.rank for task in tasks) == [0, 1]
    assert {task.first_host for task in tasks} <= document["services"].keys()
    assert len({task.launch_id for task in tasks}) == 1
