"""Random bash scripts: assignments, tests, branches, loops and functions over four variables and an array.

Each ends with a call of ``launch`` with the variables, each one word, and the array behind them.
"""

from __future__ import annotations

from random import Random

VARIABLES = "ABCD"
LAST = 'launch "$A" "$B" "${C:-none}" "x$D" "${R[@]}"'
VALUES = (
    *("1", "2", "'x y'", '"a b"', '"${V}"', "$V", "${V:-7}", "${V:=8}", "${V:+z}", '"p ${V} q"', "$(echo 5)"),
    *("$((${N:-1} * 2 + 1))", '"${R[@]}"', '"${R[*]}"', "$1", '"$@"'),
)
ASSIGNMENTS = ("V=X", "V=X", "V+=X", "export V=X", "R+=(X)", "R=(X k)", ": ${V:=3}", "unset V")
CONDITIONS = (
    *("[ -e x ]", "! [ -e x ]", '[ "$V" = 2 ]', "[[ -z $V ]]", '[[ "$V" == *b* ]]', 'test -n "$V"', "true"),
    *("false", '[ "${V:-0}" -gt 1 ]', "[[ -n $V && ( $V != 1 || -e x ) ]]"),
)


class Script:
    """``lines`` of a random script, of which each test of a file ``x`` may go either way."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.lines = ["f() {", f"local {self._some(VARIABLES)}=4", *self._block(2, "return 0"), "}"]
        self.lines += [*self._block(3, "exit 1"), *self._block(3, "exit 1"), LAST]

    def _some(self, choices: str | tuple[str, ...]) -> str:
        chosen = self.random.choice(choices)
        return chosen if len(chosen) == 1 else chosen.replace("V", self.random.choice(VARIABLES))

    def _assignment(self) -> str:
        return self._some(ASSIGNMENTS).replace("X", self._some(VALUES))

    def _block(self, depth: int, leave: str) -> list[str]:
        number = self.random.randint(1, 3)
        return [line for _ in range(number) for line in self._statement(depth, leave)]

    def _statement(self, depth: int, leave: str) -> list[str]:
        kind = self.random.random() if depth else 0
        if kind < 0.5:
            return [self._assignment()]
        if kind < 0.65:
            lines = [f"if {self._some(CONDITIONS)}; then", *self._block(depth - 1, leave)]
            lines += [f"elif {self._some(CONDITIONS)}; then", *self._block(depth - 1, leave)]
            return [*lines, "else", *self._block(depth - 1, leave), "fi"]
        if kind < 0.72:
            return [f"{self._some(CONDITIONS)} {self.random.choice(('&&', '||'))} {self._assignment()}"]
        if kind < 0.78:
            return [f"{self._some(CONDITIONS)} && {{ {self._assignment()}; {leave}; }}"]
        if kind < 0.84:
            items = [f"2|a*) {self._assignment()} ;;", f"*) {self._assignment()} ;;"]
            return [f'case "{self._some(("$V",))}" in', *items, "esac"]
        if kind < 0.92:
            leave = self.random.choice((leave, "break", "continue"))
            return [f"for {self._some(VARIABLES)} in 1 2; do", *self._block(depth - 1, leave), "done"]
        if kind < 0.95:
            return ["(", *self._block(depth - 1, leave), ")"]
        return [f"f {self._some(VALUES)}"] if leave == "exit 1" else [self._assignment()]
