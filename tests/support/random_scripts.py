"""Random bash scripts: assignments, tests, branches, loops and functions over four variables and an array.

Each ends with a call of ``launch`` with the variables, each one word, and the array behind them.
"""

from __future__ import annotations

import re
from random import Random

LAST = 'launch "$A" "$B" "${C:-none}" "x$D" "${R[@]}"'
#: What each ``<word>`` may become; of a file ``x`` each test may go either way.
GRAMMAR = {
    "V": tuple("ABCD"),
    "value": (
        *("1", "2", "'x y'", '"a b"', '"${<V>}"', "$<V>", "${<V>:-7}", "${<V>:=8}", "${<V>:+z}"),
        *('"p ${<V>} q"', "$(echo 5)", "$((${N:-1} * 2 + 1))", '"${R[@]}"', '"${R[*]}"', "$1", '"$@"'),
    ),
    "assignment": (
        *("<V>=<value>", "<V>=<value>", "<V>+=<value>", "export <V>=<value>", "R+=(<value>)"),
        *("R=(<value> k)", ": ${<V>:=3}", "unset <V>"),
    ),
    "test": (
        *("[ -e x ]", "! [ -e x ]", '[ "$<V>" = 2 ]', "[[ -z $<V> ]]", '[[ "$<V>" == *b* ]]', "true"),
        *('test -n "$<V>"', "false", '[ "${<V>:-0}" -gt 1 ]', "[[ -n $<V> && ( $<V> != 1 || -e x ) ]]"),
    ),
    "block": ("<statement>", "<statement>\n<statement>", "<statement>\n<statement>\n<statement>"),
    "statement": (
        *["<assignment>"] * 10,
        *["if <test>; then\n<block>\nelif <test>; then\n<block>\nelse\n<block>\nfi"] * 3,
        *("<test> && <assignment>", "<test> || <assignment>", *["<test> && { <assignment>; <leave>; }"] * 3),
        'case "$<V>" in\n2|a*) <assignment> ;;\n*) <assignment> ;;\nesac',
        *["for <V> in 1 2; do\n<block>\ndone"] * 3,
        *("(\n<block>\n)", "<call>"),
    ),
    "call": ("f <value>",),
}


def random_script(seed: int) -> str:
    random = Random(seed)

    def made(word: str, depth: int = 0, leave: str = "") -> str:
        if word == "leave":
            return leave
        if (word == "statement" and not depth) or (word == "call" and leave != "exit 1"):
            word = "assignment"
        text, depth = random.choice(GRAMMAR[word]), depth - (word == "statement")
        leave = random.choice((leave, "break", "continue")) if text.startswith("for") else leave
        return re.sub("<(.*?)>", lambda found: made(found[1], depth, leave), text)

    blocks = made("block", 2, "return 0"), made("block", 3, "exit 1"), made("block", 3, "exit 1")
    return "f() {{\nlocal {}=4\n{}\n}}\n{}\n{}\n{}".format(made("V"), *blocks, LAST)
