"""The Compose file and the Kubernetes example follow their specifications, and agree with the configuration of the proxy."""

import re

import pytest
import yaml

from tests.conftest import ROOT

FOLDER = ROOT / "examples" / "deployment"


def test_the_compose_file_follows_the_specification(tmp_path):
    check = pytest.importorskip("check_jsonschema").main
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((FOLDER / "compose.yaml").read_text().replace("networks: [outside]", "networks: 3"))
    for file, code in ((FOLDER / "compose.yaml", 0), (wrong, 1)):
        with pytest.raises(SystemExit) as end:
            check(["--builtin-schema", "vendor.compose-spec", str(file)])
        assert end.value.code == code


def test_the_kubernetes_example_follows_the_api():
    validate = pytest.importorskip("kubernetes_validate")
    parts = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
    assert [part["kind"] for part in parts].count("Deployment") == 2
    for part in parts:
        validate.validate(part, "1.30", strict=True)
    with pytest.raises(validate.ValidationError):
        validate.validate(parts[0] | {"spec": {"accessModes": "none"}}, "1.30", strict=True)


def test_the_parts_fit_together():
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    pods = {
        part["metadata"]["name"]: part
        for part in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
        if part["kind"] == "Deployment"
    }
    [listen] = re.findall(r"listen (\d+) ssl", (FOLDER / "nginx.conf").read_text())
    [behind] = re.findall(r"proxy_pass https://(\S+);", (FOLDER / "nginx.conf").read_text())
    assert compose["proxy"]["ports"] == [f"{listen}:{listen}"]
    assert "ports" not in compose["superlink"]  # reachable through the proxy only
    assert behind == "superlink:8000"
    assert "--port 8000" in compose["superlink"]["command"]
    for command in (compose["superlink"]["command"], " ".join(pods["superlink"]["spec"]["template"]["spec"]["containers"][0]["args"])):
        assert "--enable-supernode-auth" in command
        assert "--database" in command
