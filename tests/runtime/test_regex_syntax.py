"""Which regular expressions are handed on, and what the others hear."""

import pytest

from dualpace.runtime.regex_syntax import UnsupportedRegex, plain_regex


@pytest.mark.parametrize(
    "text",
    [
        *("^abc$", "^a|b$", "(?:a)(?<n>b)", "a*?b+?c{2}?d{2,}e{2,5}", r"\{a\}\$\^", "[$^*+{(]"),
        *(r"\u{1F600}\u0041\x41\cA", r"[\b\]]\d\W", "(" * 64 + "a" + ")" * 64, "a||b", "[a"),
    ],
)
def test_what_the_compiler_reads_as_it_is_meant_is_handed_on(text: str) -> None:
    assert plain_regex(text) == text


def test_needless_backslashes_are_left_out() -> None:
    assert plain_regex(r"a\ b\-\_\é[\ \-\_]") == r"a b\-_é[ \-_]"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (r"\Aabc\Z", r"'\A' cannot be enforced: leave it out, the expression is the whole text (a"),
        (r"abc\Z", r"'\Z' cannot be enforced: leave it out"),
        ("a^b", "'^' inside cannot be enforced: the expression is the whole text, so leave it"),
        ("$a", "'$' inside"),
        ("(^a$)", "'^' inside"),
        ("^a$|^b$", "'$' inside cannot be enforced"),
        (r"\Q.\E", r"'\Q' cannot be enforced"),
        (r"a\b", r"'\b' cannot be enforced"),
        (r"a[x\B]", r"'\B' cannot be enforced"),
        (r"\p{L}", r"'\p' cannot be enforced"),
        (r"(a)\1", r"'\1' cannot be enforced: it refers back"),
        (r"\0", r"'\0' cannot be enforced"),
        ("(?P<n>a)", "'(?P' cannot be enforced: write (?<name>...), or a group without a name"),
        ("(?<!a)b", "'(?<!' looks around and cannot be enforced"),
        ("(?i)a", "'(?i' cannot be enforced: write (...) or (?:...), without flags"),
        ("a{2,1}", "'{2,1}' has a lower bound above the upper one: exchange them (at character 2)"),
        ("a{,3}", "'{,3}' is no count: write {2}, {2,} or {2,5}"),
        ("a{2147483648}", "'{2147483648}' is above 2147483647: use less"),
        ("(*a)", r"'*' repeats nothing: write \*"),
        ("a++", "'+' repeats what is repeated already"),
        ("[[:alpha:]]", "'[:' cannot be enforced: write out the characters"),
        ("[]a]", r"'[]' is an empty class: write \]"),
        ("(" * 65 + "a" + ")" * 65, "groups are nested more than 64 deep: nest them less"),
    ],
)
def test_what_it_would_read_otherwise_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UnsupportedRegex) as refusal:
        plain_regex(text)
    assert sentence in str(refusal.value)
