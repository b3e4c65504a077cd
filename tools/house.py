"""Measure the house: lines, rows, settings, targets, words and the longest sentences.

    python tools/house.py                        figures of the whole repository
    python tools/house.py --sentences 300        the longest sentences, with their places
    python tools/house.py --sentences 50 docs    of some files or folders alone

A sentence is what a reader reads at once: of pages its text without programs, tables cell by cell; of sources the
docstrings, comments and messages. It ends with a full stop, a question mark or a colon.
"""

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORDS = ("its", "those", "such", "told", "found", "tell", "tells")
MOST_WORDS = 35
INTERNAL = {"JAXMPI_SPARES", "JAXMPI_JOB_FOLDER"}
"""Variables that the launcher sets for the ranks, and no user."""
READ = ("python", "csrc", "docs", "README.md", "CONTRIBUTING.md")
"""Where words and sentences are counted."""


def tracked(*places: str) -> list[Path]:
    names = subprocess.check_output(["git", "ls-files", "-z", *places], cwd=ROOT, text=True).split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def paragraphs_of_page(text: str) -> list[tuple[int, str]]:
    """The paragraphs, list items and cells of a Markdown page, each with its line."""
    made: list[tuple[int, str]] = []
    fence, current, start = "", [], 0

    def end() -> None:
        if current:
            made.append((start, " ".join(current)))
            current.clear()

    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        marks = re.match(r"(`{3,}|~{3,}|:{3,})", stripped)
        if fence:
            fence = "" if stripped.startswith(fence) and not stripped.strip("`~:") else fence
            continue
        if marks and not marks[1].startswith(":"):
            end()
            fence = marks[1]
        elif stripped.startswith("|"):
            end()
            made += [(number, cell.strip()) for cell in stripped.strip("|").split("|")]
        elif not stripped or marks or (stripped.startswith(("#", "<", "[")) and not current):
            end()
        else:
            if re.match(r"([-*+]|\d+\.) ", stripped):
                end()
                stripped = re.sub(r"^([-*+]|\d+\.) ", "", stripped)
            if not current:
                start = number
            current.append(stripped)
    end()
    return made


def blocks(lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Lines that follow each other as paragraphs."""
    made: list[tuple[int, list[str]]] = []
    last = -1
    for number, line in lines:
        begins = not line or re.match(r"([-*]|\w+:$|\d+\.|\.\.|>>>) ?", line)
        if number != last + 1 or begins:
            made.append((number, []))
        if line:
            made[-1][1].append(line)
        last = number
    return [(number, " ".join(words)) for number, words in made if words]


def paragraphs_of_python(text: str) -> list[tuple[int, str]]:
    tree = ast.parse(text)
    made: list[tuple[int, str]] = []
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
            value = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            value = node.value
        else:
            continue
        if value.count(" ") > 3:
            made += blocks([(node.lineno + i, line.strip()) for i, line in enumerate(value.splitlines())])
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [(token.start[0], token.string.lstrip("# ")) for token in tokens if token.type == tokenize.COMMENT]
    return made + blocks(comments)


def paragraphs_of_c(text: str) -> list[tuple[int, str]]:
    made: list[tuple[int, str]] = []
    for match in re.finditer(r"/\*(.*?)\*/", text, re.DOTALL):
        first = text.count("\n", 0, match.start()) + 1
        made += blocks([(first + i, line.strip(" *")) for i, line in enumerate(match[1].splitlines())])
    for match in re.finditer(r'(?:"(?:[^"\\\n]|\\.)*"\s*)+', text):
        value = " ".join("".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', match[0])).split("\\n"))
        if value.count(" ") > 3:
            made.append((text.count("\n", 0, match.start()) + 1, value))
    return made


READERS = {
    ".md": paragraphs_of_page,
    **dict.fromkeys((".py", ".pyi"), paragraphs_of_python),
    **dict.fromkeys((".c", ".h", ".def"), paragraphs_of_c),
}


def paragraphs(path: Path) -> list[tuple[int, str]]:
    read = READERS.get(path.suffix)
    return read(path.read_text()) if read else []


def sentences(path: Path) -> list[tuple[int, str]]:
    """The sentences of a file; code between backquotes, links and formulas count as one word each."""
    made = []
    for line, text in paragraphs(path):
        plain = re.sub(r"``?[^`]+``?|\$[^$]+\$", "CODE", re.sub(r"\]\([^)]*\)", "]", text))
        made += [(line, sentence.strip()) for sentence in re.split(r"(?<=[.?!:])[)\"']?\s+", plain) if sentence]
    return made


def figures() -> dict[str, int]:
    def lines(*places: str) -> int:
        return sum(path.read_text(errors="ignore").count("\n") for path in tracked(*places))

    def rows(file: str, mark: str) -> int:
        return len(re.findall(mark, (ROOT / file).read_text(), re.MULTILINE))

    makefile = (ROOT / "Makefile").read_text() + (ROOT / "tests/c/Makefile").read_text()
    functions = []
    for path in tracked("python"):
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    functions.append((node.end_lineno or 0) - node.lineno + 1)
    settings = (ROOT / "python/jaxmpi/_mpi/settings.py").read_text()
    return {
        "lines of csrc": lines("csrc"),
        "lines of python": lines("python"),
        "lines of tests": lines("tests"),
        "lines of docs": lines("docs/*.md", "docs/**/*.md", "README.md", "CONTRIBUTING.md"),
        "lines of the launcher": lines("python/jaxmpi/run.py", "python/jaxmpi_launch"),
        "rows of ops.def": rows("csrc/core/ops.def", r"^(OP|OPERATION|ROW)\("),
        "settings": len(set(re.findall(r'"(JAXMPI_[A-Z_]+)"[,)]', settings)) - INTERNAL),
        "marks of pytest": rows("pyproject.toml", r'^  "\w+(\(.*?\))?: '),
        "make targets": len(re.findall(r"^[\w-]+:.*## ", makefile, re.MULTILINE)),
        "longest Python function": max(functions),
        "private terms": rows("docs/glossary.md", r"^\*\*(.+?)\*\*: "),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", default=READ, metavar="PLACE")
    parser.add_argument("--sentences", type=int, default=0, metavar="N", help="print the N longest sentences")
    options = parser.parse_args()
    files = [path for path in tracked(*options.places) if path.suffix in READERS]
    all_of_them = [(path.relative_to(ROOT), line, text) for path in files for line, text in sentences(path)]
    longest = sorted(all_of_them, key=lambda row: -len(row[2].split()))
    if options.sentences:
        for name, line, text in longest[: options.sentences]:
            print(f"{len(text.split())} {name}:{line} {text}")
        return
    if tuple(options.places) == READ:
        for name, number in figures().items():
            print(f"{number:7} {name}")
    counts = Counter(word for path in files for word in re.findall(r"[a-z]+", path.read_text().lower()))
    for word in WORDS:
        print(f"{counts[word]:7} {word}")
    print(f"{sum(len(text.split()) > MOST_WORDS for *_, text in longest):7} sentences of more than {MOST_WORDS} words")


if __name__ == "__main__":
    main()
