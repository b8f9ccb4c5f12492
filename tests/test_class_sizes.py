"""No class of native/src has more than 20 fields or 25 methods, so that each class owns one piece of state.

A struct without methods holds the arguments of a call, or a table of functions, and may have 28 fields. A small parser
reads the class bodies. Constants, constructors, destructors, operators, nested types and inherited members are not
counted; a function pointer is a field.
"""

import re
from pathlib import Path

NATIVE = Path(__file__).resolve().parent.parent / "native" / "src"
FIELDS, METHODS, ARGUMENTS = 20, 25, 28
# Larger classes, with their own limits of fields and methods. V is a vector register: each method is one instruction,
# and the kernel templates call it by the same name on every CPU.
LARGER = {
    "kernels/kernels_avx2.cpp: V": (1, 28),
    "kernels/kernels_avx512.h: V": (1, 27),
}
NOISE = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*',
    re.DOTALL | re.MULTILINE,
)
HEAD = re.compile(r"(?<!enum )\b(?:class|struct)\s+([\w:]+)(?:\s+final)?\s*(?::[^:{;()][^{;()]*)?\{")
LABEL = re.compile(r"^\s*(?:public|protected|private)\s*:(?!:)")
SKIPPED = re.compile(r"\s*(?:using|typedef|friend|static_assert|static\s+constexpr|constexpr|enum)\b")
POINTER = re.compile(r"\(\s*(?:\w+::)*\*\s*\w*\s*(?:\[[^\]]*\])?\)\s*\(")
TYPE = re.compile(r"\s*(class|struct|enum|union)\b[^=()]*\{\}$")


def closing(text, start):
    """Returns the index of the bracket that closes the bracket at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "({[") - (text[i] in ")}]")
        if depth == 0:
            return i
    raise ValueError(text[start : start + 80])


def statements(body):
    """Yields the declarations of a class body, without the content of function bodies and initialisers."""
    out, i = "", 0
    while i < len(body):
        if body[i] in "{(":
            end = closing(body, i)
            is_body = body[i] == "{" and re.search(r"(\)|\bconst|\bnoexcept|\boverride|\btry|\})\s*$", out)
            pointer = body[i] == "(" and POINTER.match(body, i)
            out += body[i : end + 1] if pointer else body[i] + body[end]
            i = end + 1
            is_type = out.endswith("{}") and TYPE.match(LABEL.sub("", out))
            # neither one of several initialisers nor a type with variables
            if (is_body or is_type) and not re.match(r"\s*(,|\w+\s*[;={])", body[i:]):
                yield out
                out = ""
            continue
        if body[i] == ";":
            yield out
            out = ""
        else:
            out += body[i]
        i += 1


def declarators(statement):
    """Returns the number of variables in a declaration of fields."""
    flat = statement
    while (less := re.sub(r"<[^<>]*>|\([^()]*\)|\{[^{}]*\}|\[[^][]*\]", "", flat)) != flat:
        flat = less
    return flat.count(",") + 1


def counted(name, body):
    """Returns (fields, methods) of a class."""
    fields = methods = 0
    for statement in statements(body):
        while LABEL.match(statement):
            statement = LABEL.sub("", statement)
        if not statement.strip() or SKIPPED.match(statement):
            continue
        flat = re.sub(r"^\s*template\s*<[^{]*?>\s*(?=\w)", "", statement)
        if re.match(r"\s*(class|struct|union)\b", flat):
            fields += bool(re.search(r"\}\s*\w", flat))
            continue
        if POINTER.search(flat):
            fields += 1
            continue
        initialised = re.split(r"(?<![=!<>])=(?!=)", flat)[0] if "operator" not in flat else flat
        if "(" not in re.sub(r"<[^<>]*>", "", initialised):
            fields += declarators(flat)
        elif not re.search(rf"(~|\boperator\b|(^|\s|explicit ){re.escape(name)}\s*\()", initialised):
            methods += 1
    return fields, methods


def classes(source):
    """Yields (name, fields, methods) of every class with a body."""
    text = NOISE.sub("", source)
    for head in HEAD.finditer(text):
        end = closing(text, head.end() - 1)
        name = head.group(1)
        yield name, *counted(name.split("::")[-1], text[head.end() : end])


def most(place, methods):
    """Returns the limits (fields, methods) of a class."""
    return LARGER.get(place, (FIELDS if methods else ARGUMENTS, METHODS))


def too_large(sources):
    return [
        f"{path}: {name} has {fields} fields and {methods} methods"
        for path, source in sources.items()
        for name, fields, methods in classes(source)
        if fields > most(f"{path}: {name}", methods)[0] or methods > most(f"{path}: {name}", methods)[1]
    ]


def native():
    found = [path for path in sorted(NATIVE.rglob("*")) if path.suffix in (".h", ".cpp")]
    return {path.relative_to(NATIVE).as_posix(): path.read_text("utf-8") for path in found}


def test_no_class_of_the_library_is_too_large():
    assert too_large(native()) == []


def test_the_classes_that_are_larger_are_there():
    found = {f"{path}: {name}" for path, source in native().items() for name, _, _ in classes(source)}
    assert not set(LARGER) - found


def test_the_parser_sees_all_classes():
    assert sum(1 for source in native().values() for _ in classes(source)) > 200


SAMPLE = """
enum class Colour { red };  // class Not { int a; };
class Small final : public Base<int> {
  public:
    explicit Small(int x) : a_(x), b_{ x } {}
    ~Small() { drop(); }
    Small & operator=(const Small &) = delete;
    static constexpr int MOST = 3;
    using T = int;
    struct Inner { int x, y; double z[3]; };
    template <class F> void each(const F & f) const { f(a_); if (a_) { f(b_); } }
    virtual bool open(std::map<int, int> & x, int n = 3) = 0;
    const Small & self() const { return *this; }

  private:
    int a_ = 0, b_{ 1 };
    std::map<std::string, std::vector<int>> names_;
    void (*call_)(int, void *) = nullptr;
    Inner inner_ = { 1, 2 };
};
"""


def test_what_the_parser_counts():
    assert list(classes(SAMPLE)) == [("Small", 5, 3), ("Inner", 3, 0)]


def test_what_this_test_would_find():
    fields = "class Wide {\n    void f();\n" + "".join(f"    int x{i};\n" for i in range(FIELDS + 1)) + "};"
    bodies = "".join(f"    int f{i}() const {{ return {i}; }}\n" for i in range(METHODS + 1))
    methods = f"struct Long {{\n{bodies}}};"
    assert too_large({"a.h": fields, "b.h": methods}) == [
        "a.h: Wide has 21 fields and 1 methods",
        "b.h: Long has 0 fields and 26 methods",
    ]
