"""docker/kubernetes.yaml: against Kubernetes' schema, and its pods' commands on two hosts.

There is no cluster: names, secret and variables are made here as the manifest asks for them.
"""

from __future__ import annotations

import copy
import importlib.util
import shlex
from pathlib import Path
from typing import Any

import pytest
from support import digits, two_hosts
from support.places import APPS, ROOT
from support.requiring import lacking

pytestmark = pytest.mark.full

VERSION = "1.30"  # of Kubernetes
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@pytest.fixture
def service_and_job() -> list[dict[str, Any]]:
    if importlib.util.find_spec("kubernetes_validate") is None:
        lacking("pip install 'pgasdl[launchers]'")
    import yaml

    return list(yaml.safe_load_all((ROOT / "docker/kubernetes.yaml").read_text()))


def test_schema(service_and_job: list[dict[str, Any]]) -> None:
    import kubernetes_validate

    for manifest in service_and_job:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
    wrong = copy.deepcopy(service_and_job[1])
    wrong["spec"]["template"]["spec"]["containers"][0]["env"][0]["valueFrom"]["field"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="field"):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_its_parts_fit(service_and_job: list[dict[str, Any]]) -> None:
    """Numbers and names that are written more than once agree, which no schema can check."""
    service, job = service_and_job
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (rank,) = pod["containers"]
    variables = {each["name"]: each.get("value") for each in rank["env"]}
    assert spec["completionMode"] == "Indexed"
    assert int(variables["PGASDL_SIZE"]) == spec["completions"] == spec["parallelism"]
    first = f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert variables["PGASDL_STORE"].split(":")[0] == first
    assert f" {first};" in pod["initContainers"][0]["command"][-1]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    selector = {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["spec"]["selector"] == selector
    (mount,), (volume,) = rank["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"] and mount["subPath"] == "secret"


def pod(manifest: dict[str, Any], index: int, program: str | None = None) -> str:
    """The commands of a pod, its init container first; ``program`` replaces the rank's."""
    spec = manifest["spec"]["template"]["spec"]
    (before,), (rank,) = spec["initContainers"], spec["containers"]
    variables = {"JOB_COMPLETION_INDEX": str(index)}
    for each in rank["env"]:
        if "value" in each:
            variables[each["name"]] = each["value"]
        else:
            assert each["valueFrom"] == {"fieldRef": {"fieldPath": INDEX}}
            variables[each["name"]] = str(index)
    given = [f"{name}={value}" for name, value in variables.items()]
    command = program or shlex.join(rank["command"]).replace("/apps", str(APPS))
    both = f"{shlex.join(before['command'])} && {shlex.join(['env', *given])} {command}"
    return f"on node{index + 1} bash -c {shlex.quote(both)}"


def test_pods(service_and_job: list[dict[str, Any]], tmp_path: Path) -> None:
    """The manifest's command, then training with the same variables."""
    two_hosts.require()
    _, job = service_and_job
    (mount,) = job["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    (volume,) = job["spec"]["template"]["spec"]["volumes"]
    saved = tmp_path / "weights.npz"
    training = digits.trains(saved)
    script = f"""
        install -D --mode={volume["secret"]["defaultMode"]:o} secret {mount["mountPath"]}
        {pod(job, 0)} & first=$!
        {pod(job, 1)} & second=$!
        echo 198.18.0.1 pgasdl-0.pgasdl >>/etc/hosts
        ended $first $second
        {pod(job, 0, training)} & first=$!
        {pod(job, 1, training)} & second=$!
        ended $first $second
    """
    told = two_hosts.succeeded(tmp_path, script)
    for rank in range(2):  # their lines may mix
        assert f"rank {rank} of 2 got {1 - rank}" in told
    assert "the same bits on 2 ranks" in told
    digits.require_same(2, saved)
