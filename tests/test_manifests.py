"""The Kubernetes manifests of docs/manifests: they are read, checked field by field, and have to go together.

This is not the API server's own validation, which alone knows what a cluster takes. The fields that the manifests use
are written down here as the Kubernetes API documents them, with their types and which of them are required, so that a
misspelt field, a value of another kind, or a claim that would never be bound does not stay unnoticed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
MANIFESTS = ROOT / "docs" / "manifests"
PAGE = ROOT / "docs" / "shared_storage.md"

Check = Callable[[object], str | None]
"""Why a value cannot stand there, None where it can."""


# --- what the API documents of the fields that are used here ---------------------------------------------------------


def text(value: object) -> str | None:
    return None if isinstance(value, str) else "a text"


def integer(value: object) -> str | None:
    return None if type(value) is int and value >= 0 else "an integer >= 0"


def boolean(value: object) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def label(value: object) -> str | None:
    """DNS-1123: what names objects and the pods' hosts."""
    form = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
    return None if isinstance(value, str) and re.fullmatch(form, value) else "a DNS label"


def class_name(value: object) -> str | None:
    return None if value == "" else label(value)


def quantity(value: object) -> str | None:
    form = r"[0-9]+(\.[0-9]+)?(m|k|[MGTPE]|[KMGTPE]i)?"
    return None if type(value) is int or (isinstance(value, str) and re.fullmatch(form, value)) else "a quantity"


def path(value: object) -> str | None:
    return None if isinstance(value, str) and value.startswith("/") else "an absolute path"


def one_of(*allowed: str) -> Check:
    return lambda value: None if value in allowed else f"one of {', '.join(allowed)}"


def each(check: object) -> tuple[str, object]:
    return "list", check


def by_name(check: object) -> tuple[str, object]:
    return "mapping", check


def metadata(*more: str) -> dict[str, object]:
    return {"name!": label, "labels": by_name(text), **{f"{name}!": label for name in more}}


MODES = each(one_of("ReadWriteMany", "ReadWriteOnce", "ReadOnlyMany", "ReadWriteOncePod"))
QUANTITIES = by_name(quantity)
CONTAINER: dict[str, object] = {
    "name!": label,
    "image!": text,
    "command": each(text),
    "args": each(text),
    "env": each({"name!": text, "value!": text}),
    "ports": each({"name": label, "containerPort!": integer}),
    "resources": {"requests": QUANTITIES, "limits": QUANTITIES},
    "volumeMounts": each({"name!": label, "mountPath!": path, "subPath": text, "readOnly": boolean}),
}
POD: dict[str, object] = {
    "subdomain": label,
    "restartPolicy!": one_of("OnFailure", "Never"),  # of a Job's pods
    "terminationGracePeriodSeconds": integer,
    "securityContext": {
        "runAsUser": integer,
        "runAsGroup": integer,
        "fsGroup": integer,
        "fsGroupChangePolicy": one_of("OnRootMismatch", "Always"),
    },
    "containers!": each(CONTAINER),
    "volumes": each(
        {
            "name!": label,
            "persistentVolumeClaim": {"claimName!": label, "readOnly": boolean},
            "emptyDir": {"medium": one_of("", "Memory"), "sizeLimit": quantity},
        }
    ),
}
KINDS: Mapping[tuple[str, str], dict[str, object]] = {
    ("v1", "PersistentVolume"): {
        "metadata!": metadata(),
        "spec!": {
            "capacity!": {"storage!": quantity},
            "accessModes!": MODES,
            "volumeMode": one_of("Filesystem", "Block"),
            "persistentVolumeReclaimPolicy": one_of("Retain", "Delete", "Recycle"),
            "storageClassName": class_name,
            "claimRef": {"namespace!": label, "name!": label},
            "mountOptions": each(text),
            "nfs!": {"server!": text, "path!": path, "readOnly": boolean},
        },
    },
    ("v1", "PersistentVolumeClaim"): {
        "metadata!": metadata("namespace"),
        "spec!": {
            "accessModes!": MODES,
            "volumeMode": one_of("Filesystem", "Block"),
            "storageClassName": class_name,
            "volumeName": label,
            "resources!": {"requests!": {"storage!": quantity}},
        },
    },
    ("v1", "Service"): {
        "metadata!": metadata("namespace"),
        "spec!": {
            "clusterIP": one_of("None"),
            "publishNotReadyAddresses": boolean,
            "selector!": by_name(text),
            "ports": each({"name": label, "port!": integer}),
        },
    },
    ("batch/v1", "Job"): {
        "metadata!": metadata("namespace"),
        "spec!": {
            "completionMode": one_of("Indexed", "NonIndexed"),
            "completions": integer,
            "parallelism": integer,
            "backoffLimit": integer,
            "template!": {"metadata": {"labels": by_name(text)}, "spec!": POD},
        },
    },
}


def faults_of(manifest: Any) -> list[str]:
    """What of a manifest the API does not document so."""
    if not isinstance(manifest, dict):
        return ["a manifest is an object"]
    kind = KINDS.get((manifest.get("apiVersion", ""), manifest.get("kind", "")))
    if kind is None:
        return [f"apiVersion {manifest.get('apiVersion')} and kind {manifest.get('kind')} do not go together"]
    return _faults(manifest, {"apiVersion!": text, "kind!": text, **kind}, manifest["kind"])


def _faults(value: object, schema: Any, where: str) -> list[str]:
    if callable(schema):
        wanted = schema(value)
        return [] if wanted is None else [f"{where} is {value!r}; allowed: {wanted}"]
    if isinstance(schema, tuple) and schema[0] == "list":
        if not isinstance(value, list) or not value:
            return [f"{where} is {value!r}; allowed: a list that is not empty"]
        return [fault for at, one in enumerate(value) for fault in _faults(one, schema[1], f"{where}[{at}]")]
    if not isinstance(value, dict):
        return [f"{where} is {value!r}; allowed: an object"]
    if isinstance(schema, tuple):
        return [fault for key, one in value.items() for fault in _faults(one, schema[1], f"{where}.{key}")]
    fields = {name.removesuffix("!"): inner for name, inner in schema.items()}
    found = [f"{where} has no {name[:-1]}" for name in schema if name.endswith("!") and name[:-1] not in value]
    found += [f"{where}.{key} is no field that is known here" for key in value if key not in fields]
    return found + [
        fault for key, one in value.items() if key in fields for fault in _faults(one, fields[key], f"{where}.{key}")
    ]


# --- what has to go together ----------------------------------------------------------------------------------------

UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def num_bytes(given: object) -> float:
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(given))
    assert match is not None
    return float(match[1]) * UNITS[match[2]]


def binding_faults(volume: Any, claim: Any) -> list[str]:
    """Why a claim would not be bound to a volume that was made by hand."""
    has, wants, found = volume["spec"], claim["spec"], []
    if wants.get("volumeName") != volume["metadata"]["name"]:
        found.append("the claim names another volume")
    if has.get("storageClassName") != wants.get("storageClassName") or wants.get("storageClassName") is None:
        found.append("their storageClassName differs, or is left to the cluster's default")
    if has.get("claimRef") != {"namespace": claim["metadata"]["namespace"], "name": claim["metadata"]["name"]}:
        found.append("the volume is reserved for another claim")
    if not set(wants["accessModes"]) <= set(has["accessModes"]):
        found.append("the volume does not have the claim's access modes")
    if has.get("volumeMode", "Filesystem") != wants.get("volumeMode", "Filesystem"):
        found.append("their volumeMode differs")
    if num_bytes(wants["resources"]["requests"]["storage"]) > num_bytes(has["capacity"]["storage"]):
        found.append("the claim is larger than the volume")
    return found


def mounting_faults(claim: Any, service: Any, job: Any) -> list[str]:
    """Why a job's pods would not get the claim, or would not find one another."""
    pod, found = job["spec"]["template"]["spec"], []
    claims = {
        volume["persistentVolumeClaim"]["claimName"]: volume["name"]
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    names = [volume["name"] for volume in pod["volumes"]]
    mounts = [mount for container in pod["containers"] for mount in container["volumeMounts"]]
    if len({one["metadata"]["namespace"] for one in (claim, service, job)}) > 1:
        found.append("they are in several namespaces")
    if claim["metadata"]["name"] not in claims:
        found.append("the pods do not have the claim")
    elif claims[claim["metadata"]["name"]] not in [mount["name"] for mount in mounts]:
        found.append("no container mounts the claim")
    if sorted(names) != sorted({mount["name"] for mount in mounts}):
        found.append("volumes and mounts differ")
    if "ReadWriteMany" not in claim["spec"]["accessModes"]:
        found.append("several nodes cannot write to the claim")
    if job["spec"]["completions"] != job["spec"]["parallelism"]:
        found.append("not all pods run at once")
    if not service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items():
        found.append("the service has none of the job's pods")
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    if pod.get("subdomain") != service["metadata"]["name"] or f"--rdzv-endpoint={host}" not in _command(pod):
        found.append("the pods look for another host than the first pod")
    if f"--nnodes={job['spec']['parallelism']}" not in _command(pod):
        found.append("torchrun waits for another number of pods")
    return found


def _command(pod: Any) -> list[str]:
    return list(pod["containers"][0]["command"])


# --- the manifests --------------------------------------------------------------------------------------------------


def manifests_in(file: str) -> list[Any]:
    return list(yaml.safe_load_all((MANIFESTS / file).read_text(encoding="utf-8")))


def test_every_manifest_has_the_fields_that_the_api_documents() -> None:
    files = sorted(file.name for file in MANIFESTS.iterdir())
    assert files == ["cephfs-claim.yaml", "nfs-claim.yaml", "nfs-volume.yaml", "training-job.yaml"]
    assert [fault for file in files for manifest in manifests_in(file) for fault in faults_of(manifest)] == []


def test_the_claim_is_bound_to_the_volume() -> None:
    (volume,), (claim,) = manifests_in("nfs-volume.yaml"), manifests_in("nfs-claim.yaml")
    assert binding_faults(volume, claim) == []


@pytest.mark.parametrize("file", ["nfs-claim.yaml", "cephfs-claim.yaml"])
def test_the_pods_mount_the_claim_and_find_one_another(file: str) -> None:
    (claim,), (service, job) = manifests_in(file), manifests_in("training-job.yaml")
    assert mounting_faults(claim, service, job) == []


def test_the_page_leads_to_every_manifest() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"(manifests/{file.name})" in page for file in MANIFESTS.iterdir())


# --- the checks can fail --------------------------------------------------------------------------------------------


def changed(manifest: Any, where: str, value: object) -> Any:
    """A copy with another value somewhere; None takes it out."""
    copied = copy.deepcopy(manifest)
    inner = copied
    *way, last = [int(step) if step.isdigit() else step for step in where.split("/")]
    for step in way:
        inner = inner[step]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return copied


@pytest.mark.parametrize(
    ("file", "where", "value", "words"),
    [
        ("nfs-volume.yaml", "apiVersion", "v2", "do not go together"),
        ("nfs-volume.yaml", "metadata/name", "Checkpoints", "allowed: a DNS label"),
        ("nfs-volume.yaml", "spec/capacity/storage", "2TB", "allowed: a quantity"),
        ("nfs-volume.yaml", "spec/nfs", None, "spec has no nfs"),
        ("nfs-volume.yaml", "spec/nfs/path", "export", "allowed: an absolute path"),
        ("nfs-claim.yaml", "spec/accessModes", "ReadWriteMany", "allowed: a list"),
        ("nfs-claim.yaml", "spec/accessModes/0", "RWX", "allowed: one of ReadWriteMany"),
        ("nfs-claim.yaml", "spec/resources/requests/storage", None, "requests has no storage"),
        ("nfs-claim.yaml", "spec/storageclassName", "", "no field that is known here"),
    ],
)
def test_a_manifest_that_is_wrong_is_found(file: str, where: str, value: object, words: str) -> None:
    (manifest,) = manifests_in(file)
    (fault,) = faults_of(changed(manifest, where, value))
    assert words in fault


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        ("spec/volumeName", "another", "another volume"),
        ("spec/storageClassName", None, "storageClassName differs"),
        ("metadata/name", "mine", "reserved for another claim"),
        ("spec/accessModes/0", "ReadWriteOnce", "access modes"),
        ("spec/volumeMode", "Block", "volumeMode differs"),
        ("spec/resources/requests/storage", "3Ti", "larger than the volume"),
    ],
)
def test_a_claim_that_would_not_be_bound_is_found(where: str, value: object, words: str) -> None:
    (volume,), (claim,) = manifests_in("nfs-volume.yaml"), manifests_in("nfs-claim.yaml")
    (fault,) = binding_faults(volume, changed(claim, where, value))
    assert words in fault


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        ("metadata/namespace", "default", "several namespaces"),
        ("spec/template/spec/volumes/0/persistentVolumeClaim/claimName", "other", "do not have the claim"),
        ("spec/template/spec/containers/0/volumeMounts/0/name", "run", "no container mounts the claim"),
        ("spec/parallelism", 2, "not all pods run at once"),
        ("spec/template/metadata/labels/app", "other", "none of the job's pods"),
        ("spec/template/spec/subdomain", "other", "another host"),
        ("spec/template/spec/containers/0/command/1", "--nnodes=3", "another number of pods"),
    ],
)
def test_a_job_that_would_not_run_with_the_claim_is_found(where: str, value: object, words: str) -> None:
    (claim,), (service, job) = manifests_in("nfs-claim.yaml"), manifests_in("training-job.yaml")
    assert any(words in fault for fault in mounting_faults(claim, service, changed(job, where, value)))
