"""The public interface of `import pykvedge`: all names, all errors, help texts, and their examples."""

import ast
import importlib
import inspect
import pkgutil
import pydoc
from pathlib import Path

import pytest

import pykvedge

PACKAGE = Path(pykvedge.__file__).parent
# raised inside the package and replaced before a caller of the public interface sees them
INSIDE = {"ValueError", "AttributeError", "EOFError", "OSError"}


def modules():
    """Yields every module of the package, imported."""
    for info in pkgutil.walk_packages([str(PACKAGE)], "pykvedge."):
        if info.name != "pykvedge.__main__":
            yield importlib.import_module(info.name)


def exceptions():
    """Returns every exception class of the package, except its warning."""
    found = set()
    for module in modules():
        for thing in vars(module).values():
            if inspect.isclass(thing) and issubclass(thing, BaseException) and thing.__module__.startswith("pykvedge"):
                found.add(thing)
    return found - {pykvedge.KvedgeWarning}


def test_every_error_is_exported_and_a_kvedge_error():
    found = exceptions()
    assert len(found) > 15
    for error in found:
        assert issubclass(error, pykvedge.KvedgeError), error
        assert getattr(pykvedge, error.__name__) is error and error.__name__ in pykvedge.__all__, error


def test_every_error_has_a_line_for_the_user():
    for error in exceptions():
        assert error.__doc__ and error.exit_code in (1, 2, 130)
    assert str(pykvedge.CancelledError())
    assert issubclass(pykvedge.OutOfMemoryError, MemoryError) and issubclass(pykvedge.UsageError, ValueError)


def raised(tree):
    """Yields the names that `raise` statements call or name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            what = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            yield what.attr if isinstance(what, ast.Attribute) else getattr(what, "id", "")


def test_nothing_else_is_raised():
    """The sources raise only KvedgeErrors, variables, and the names in INSIDE."""
    errors, strangers = {error.__name__ for error in exceptions()}, set()
    for file in PACKAGE.rglob("*.py"):
        if "cli" in file.relative_to(PACKAGE).parts:
            continue
        for name in raised(ast.parse(file.read_text("utf-8"))):
            if name.endswith(("Error", "Exception")) and name not in errors | INSIDE:
                strangers.add((file.name, name))
    assert not strangers


def test_names_are_there():
    assert len(set(pykvedge.__all__)) == len(pykvedge.__all__)
    for name in pykvedge.__all__:
        assert getattr(pykvedge, name) is not None
        assert name in dir(pykvedge)
    space: dict = {}
    exec("from pykvedge import *", space)
    assert set(pykvedge.__all__) <= set(space)
    with pytest.raises(AttributeError, match="no attribute 'Sesion'"):
        getattr(pykvedge, "Sesion")  # noqa: B009 - as an attribute, scripts/check_imports.py would report it


def test_whatever_is_public_says_what_it_is():
    for name in pykvedge.__all__:
        thing = getattr(pykvedge, name)
        if name == "__version__":
            continue
        assert inspect.getdoc(thing), name
        if not inspect.isclass(thing) or issubclass(thing, BaseException):
            continue
        for member, value in vars(thing).items():
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                assert inspect.getdoc(value), f"{name}.{member}"


def test_help_lists_everything():
    text = pydoc.plain(pydoc.render_doc(pykvedge))
    for name in pykvedge.__all__:
        assert name in text or name == "__version__", name
    assert "docs/python.md" in text


def test_importing_needs_neither_numpy_of_sessions_nor_libraries(started):
    """Lazy names are imported at their first use."""
    code = "import sys, pykvedge; print('pykvedge.chat.session' in sys.modules, 'llama_cpp' in sys.modules)"
    assert started(program=("-c", code)).out.split() == ["False", "False"]


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()


def test_settings_have_the_types_of_their_fields():
    from dataclasses import fields

    from pykvedge.runtime.settings import GivenSettings, Settings

    given = {name: getattr(kind, "__forward_arg__", kind) for name, kind in GivenSettings.__annotations__.items()}
    assert {f.name: f.type for f in fields(Settings)} == given


# ------------------------------------------------------------------------------------------------- bad calls


def test_what_a_session_is_given_is_checked(tiny, native):
    files = tiny("llama")
    for model in (None, "", "a\0b"):  # other types: test_wrong_types.py
        for open_ in (pykvedge.Session, pykvedge.load):
            with pytest.raises(pykvedge.UsageError):
                open_(model)
    with pytest.raises(pykvedge.UsageError, match="mmproj"):
        pykvedge.Session(files.model, pykvedge.plan("h2o"))
    for plan in ("lookm", 0.2, pykvedge.plan):
        with pytest.raises(pykvedge.UsageError, match=r"must be a pykvedge\.Plan"):
            pykvedge.Session(files.model, plan=plan)
    with files.session() as session, pytest.raises(pykvedge.UsageError, match="must be text"):
        session.ask(None)


@pytest.mark.parametrize(("kind", "name", "value"), [
    *((pykvedge.Sampling, *given) for given in (("temp", "hot"), ("max_tokens", None), ("top_k", 2.5), ("seed", 1.5))),
    *((pykvedge.Settings, *given) for given in (("threads", "4"), ("n_ctx", 1.5), ("gpu_layers", "all"),
                                                ("kv_type", 8), ("system", None))),
])  # fmt: skip
def test_settings_of_the_wrong_type(kind, name, value):
    with pytest.raises(pykvedge.UsageError, match=r"^[^\n]+$"):
        kind(**{name: value})


def test_objects_show_themselves_in_a_line_and_as_a_table(tiny, native):
    plan = pykvedge.plan("snapkv", 0.25, **{"scorer.window": 8})
    assert repr(plan) == "<Plan snapkv 0.25: window, uniform, evict, keep-all, scorer.window=8>"
    with tiny("llama").session(plan) as session:
        answer = session.ask("Hello <b>there</b> " * 8, sampling=pykvedge.Sampling(max_tokens=4))
        assert repr(answer).startswith("<Answer '', not finished | prompt ")
        text, report, stats = answer.read(), answer.report, session.engine.cache.stats()
        assert repr(answer) == f"<Answer {text!r}, {report.finish} | {report.line()}>"
        assert repr(report) == f"<Report snapkv 0.25: {text!r}, {report.finish} | {report.line()}>"
        assert f"{stats.n_tokens} tokens" in repr(stats) and "compressions: 1" in repr(stats)
        assert repr(session).endswith(", snapkv 0.25, 1 question>")
        report.text = "<script>"  # text of a model must be escaped in HTML
        tables = [thing._repr_html_() for thing in (plan, answer, stats)]
    assert repr(session).endswith(", snapkv 0.25, closed>")
    for page in tables:
        assert page.startswith("<table>") and "<script>" not in page
    assert f"{report.kv.kept_of_them} kept of {report.tokens.prompt}" in tables[1]
