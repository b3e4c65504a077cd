"""The recipes in packaging/ say what pyproject.toml says. What they build is tested by test_recipes.py."""

import ast
import re
from pathlib import Path

import pytest

from jaxmpi_launch import versions

pytestmark = pytest.mark.alone
ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "packaging"
PROJECT = (ROOT / "pyproject.toml").read_text()


def stated(key):
    """A value of pyproject.toml that stands on a line of its own."""
    return ast.literal_eval(re.search(rf"^{key} = (.+)$", PROJECT, re.MULTILINE)[1])


def minimum(requirement, sign=">="):
    """The name of a package and its oldest version, or an empty string."""
    name, _, version = requirement.partition(sign)
    return name.strip(), version.strip()


RUN = dict(map(minimum, stated("dependencies")))
BUILD = dict(map(minimum, stated("requires")))


def spack():
    """The recipe for Spack, and what it tells Spack: each call with its positional arguments and `type`."""
    told = []

    def directive(name):
        def tell(*arguments, type=""):
            told.append((name, arguments, type if isinstance(type, tuple) else (type,)))

        return tell

    (file,) = RECIPES.rglob("package.py")
    names = {name: directive(name) for name in ("depends_on", "license", "version")}
    names |= {"PythonPackage": object, "__file__": str(file), "__name__": "recipe"}
    exec(re.sub("^from spack.*$", "", file.read_text(), flags=re.MULTILINE), names)
    return names["PyJaxmpi"], told


def easybuild():
    """The variables of the easyconfig, and its file."""
    (file,) = RECIPES.rglob("*.eb")
    variables = {"SOURCE_TAR_GZ": "%(name)s-%(version)s.tar.gz"}
    exec(compile(file.read_text(), file, "exec"), variables)
    return variables, file


def conda(section):
    """The requirements of a section of the conda recipe."""
    text = (RECIPES / "conda/recipe.yaml").read_text()
    lines = re.search(rf"^  {section}:\n((?:    - .+\n)+)", text, re.MULTILINE)[1].splitlines()
    return dict(minimum(line.partition("#")[0].strip(" -")) for line in lines)


def test_version():
    version = stated("version")
    assert f"  version: '{version}',\n" in (ROOT / "meson.build").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    recipe, told = spack()
    assert [arguments for name, arguments, _ in told if name == "version"] == [(version,)]
    assert recipe.url == f"file://{ROOT}/dist/jaxmpi-{version}.tar.gz"
    variables, file = easybuild()
    assert variables["version"] == version
    toolchain = variables["toolchain"]
    assert file.name == f"jaxmpi-{version}-{toolchain['name']}-{toolchain['version']}.eb"
    assert f"packaging/easybuild/{file.name}\n" in file.read_text()
    assert f'  version: "{version}"\n' in (RECIPES / "conda/recipe.yaml").read_text()


def test_dependencies_that_errors_name():
    assert versions.NEEDED == RUN


def test_dependencies_of_conda():
    run, host = conda("run"), conda("host")
    oldest = stated("requires-python").removeprefix(">=")
    assert run.pop("python") == host.pop("python") == oldest
    assert host.pop("pip") == ""
    assert run == RUN
    assert host == BUILD


def test_dependencies_of_spack():
    _, told = spack()
    needed = {"build": {}, "run": {}}
    for name, (spec, *_), kinds in told:
        if name == "depends_on" and spec != "c":
            package, version = minimum(spec, "@")
            for kind in set(kinds) & set(needed):
                needed[kind][package.removeprefix("py-")] = version.removesuffix(":")
    oldest = stated("requires-python").removeprefix(">=")
    assert needed == {"build": {"python": oldest, **BUILD}, "run": {"python": oldest, **RUN}}


def numbers(version):
    return [int(number) for number in re.findall(r"\d+", version)]


def test_dependencies_of_easybuild():
    """They are of one generation of EasyBuild's easyconfigs: each has one version, which is new enough."""
    variables, _ = easybuild()
    names = {"SciPy-bundle": "numpy", "Meson": "meson", "Ninja": "ninja"}
    given = {names.get(name, name): version for name, version in variables["dependencies"]}
    python = given.pop("Python")
    assert numbers(python) >= numbers(stated("requires-python"))
    for found, wanted in (
        (given, RUN),
        ({names.get(name, name): version for name, version in variables["builddependencies"]}, BUILD),
    ):
        assert found.keys() == wanted.keys()
        assert all(numbers(found[name]) >= numbers(wanted[name]) for name in wanted)


def test_descriptions():
    description = stated("description")
    recipe, told = spack()
    assert recipe.__doc__ == f"{description}."
    assert ("license", (stated("license"),), ("",)) in told
    assert easybuild()[0]["description"] == description
    text = (RECIPES / "conda/recipe.yaml").read_text()
    assert f"  summary: {description}\n  license: {stated('license')}\n" in text


def test_containers_are_alike():
    """Both definitions execute the same commands, stage for stage, for the same image of Debian and the same MPI."""
    docker, apptainer = ((RECIPES / "containers" / name).read_text() for name in ("Dockerfile", "jaxmpi.def"))
    stages = [re.findall(r"^RUN (.+)$", stage, re.MULTILINE) for stage in re.split(r"^FROM ", docker, flags=re.M)[1:]]
    assert len(stages) == 2
    posts = [post.split("\n\n")[0] for post in apptainer.split("%post\n")[1:]]
    commands = [[line.strip().replace("{{ MPI }}", "$MPI") for line in post.splitlines()] for post in posts]
    assert commands == stages
    assert set(re.findall(r"^FROM (\S+)", docker, re.MULTILINE)) == set(re.findall(r"^From: (.+)$", apptainer, re.M))
    (mpi,) = re.findall(r"^ARG MPI=(\w+)$", docker, re.MULTILINE)
    assert f"%arguments\n    MPI={mpi}\n" in apptainer
    (named,) = re.findall(r"in one image: (\w+), (\w+) or (\w+), as an extra", docker)
    assert mpi in named
    assert all(stated(extra) for extra in named)


def test_no_address_is_invented():
    """Nothing is published yet: recipes name no address, and no checksum."""
    for file in RECIPES.rglob("*"):
        if file.is_file():
            assert not re.search(r"https?://|\b[0-9a-f]{40,}\b", file.read_text()), file


def test_docs_name_each():
    page = (ROOT / "docs/install.md").read_text()
    assert [path.name for path in RECIPES.iterdir() if f"packaging/{path.name}" not in page] == []


def test_commands_choose_a_wheel():
    """`make wheel` makes one for each kind of machine: a command that names them all is refused."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = [name for page in pages for name in re.findall(r"jaxmpi-\*\S*\.whl", page.read_text())]
    assert set(named) == {"jaxmpi-*_x86_64.whl"}
