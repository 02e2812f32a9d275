"""Plain technical English: phrases with a standard term are rare, and each that stays is meant literally.

`python tests/test_language.py [FILE OR FOLDER...]` lists where each phrase is.
"""

import pathlib
import re
import sys

from source_files import KERNELS, PACKAGE, ROOT, prose, python_files

LIMITS = {
    r"behind": 15,
    r"anew": 0,
    r"whoever|whom": 0,
    r"beside": 2,
    r"in place of": 2,
    r"befell|befalls?": 0,
    r"(?:stood|stands?|standing) still": 0,
    r"(?:is|are|was|were) told|tells? of": 2,
    r"of (?:its|their|one's) own": 20,
    r"keepers? of runs": 0,
    r"verbs?": 8,
    r"rooms|this room|each room|a room": 0,
    r"(?:bits|nats|bytes|tokens|ms) an? (?:byte|token|second|step)": 8,
    r"(?:lies|lie|stands|stand) (?:in|on|at|for|there|before|behind|below|above)": 15,
    r"(?:asks?|asked|is asked) for": 10,
    r"(?:leaves?|leaving|left) (?:it |them )?out": 8,
    r"h(?:olds?|eld) against": 2,
    r"there is no (?:config )?(?:field|option)": 0,
    r"deals? out|dealt": 2,
    r"by and by": 0,
    r"goes on|go on|going on|went on": 8,
    r"what (?:it|they|he) (?:is|are) told": 0,
}
"""Pattern of a phrase, and how often it may occur in all prose: comments, docstrings, messages, Markdown."""


def texts(*paths: pathlib.Path) -> dict[pathlib.Path, str]:
    """Prose of both packages, the documentation and the notebooks, or of the files and folders named."""
    if not paths:
        pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.py")]
        return {
            file: prose(file, with_all_strings=True) for file in (*python_files(PACKAGE, KERNELS), *pages)
        }
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return {file: prose(file, with_all_strings=True) for file in files}


def occurrences(pattern: str, prose_by_file: dict[pathlib.Path, str]) -> list[str]:
    """FILE: PHRASE for each occurrence, in any case of letters and across line ends."""
    spaced = re.compile(rf"\b(?:{pattern})\b".replace(" ", r"\s+"), re.IGNORECASE)
    return [f"{file}: {match[0]}" for file, text in prose_by_file.items() for match in spaced.finditer(text)]


def test_phrases_with_a_standard_term_are_rare():
    prose_by_file = texts()
    counts = {pattern: len(occurrences(pattern, prose_by_file)) for pattern in LIMITS}
    assert not {pattern: n for pattern, n in counts.items() if n > LIMITS[pattern]}


def test_phrases_are_found_in_comments_docstrings_and_messages(tmp_path):
    file = tmp_path / "module.py"
    file.write_text('"""Behind\nit."""\nx = behind = f"go\\n{1} behind"  # begin anew\n')
    prose_by_file = texts(file)
    assert len(occurrences("behind", prose_by_file)) == 2
    assert len(occurrences("anew|ane", prose_by_file)) == 1


if __name__ == "__main__":
    selected = texts(*map(pathlib.Path, sys.argv[1:]))
    for pattern, limit in LIMITS.items():
        places = occurrences(pattern, selected)
        print(f"{len(places)} of at most {limit}: {pattern}", *places, sep="\n  ")
