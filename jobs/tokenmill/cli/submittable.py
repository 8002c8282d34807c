"""The option `--on` of the commands that can run on a cluster: the class of these commands.

A command with `--on` does not run here. `cli.submit` submits it instead, with the options that the user set.
"""

from typing import Any, cast

from typer.core import TyperOption

from tokenmill.cli.commands import Command
from tokenmill.engine.options import Panel
from tokenmill.submit.call import Call, OptionValue

SUBMISSION_OPTIONS = ("on", "profiles", "job_name", "dry_run")


def _make_options() -> list[TyperOption]:
    """Return the options of a submission; the commands themselves have --dry-run."""
    text = {
        "on": ("NAME", "Where to run: local, slurm, kubernetes, or a profile of tokenmill.toml.", "local"),
        "profiles": ("FILE", "File of profiles. Default: tokenmill.toml in the current directory.", None),
        "job-name": ("NAME", "Name of the jobs or of the Helm release. Default: from the output.", None),
    }
    return [
        TyperOption(
            param_decls=[f"--{flag}"],
            help=help_text,
            metavar=metavar,
            default=default,
            show_default=default is not None,
            envvar="TOKENMILL_PROFILES" if flag == "profiles" else None,
            rich_help_panel=Panel.WHERE,
        )
        for flag, (metavar, help_text, default) in text.items()
    ]


class SubmittableCommand(Command):
    """A command that runs here, or with `--on` on a cluster."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Add the options of a submission to those of the command."""
        super().__init__(*args, **settings)
        self.params += _make_options()

    def invoke(self, ctx: Any) -> Any:
        """Run the command, or submit it."""
        settings = {name: ctx.params[name] for name in SUBMISSION_OPTIONS if name in ctx.params}
        if settings["on"] == "local":
            for name in SUBMISSION_OPTIONS:
                if name != "dry_run":
                    ctx.params.pop(name, None)
            return super().invoke(ctx)
        from tokenmill.cli.submit import submit

        call = self._make_call(ctx)
        values = {name: value for name, value in ctx.params.items() if name not in ("on", "profiles", "job_name")}
        check = getattr(self.callback, "check", None)
        if check:
            check(values)
        return submit(call, **settings)

    def _make_call(self, ctx: Any) -> Call:
        arguments: list[str] = []
        options: dict[str, OptionValue] = {}
        for parameter in self.params:
            raw: Any = self.raw_values.get(parameter.name or "")
            was_set = raw is not None and raw not in ([], ())
            if parameter.name in SUBMISSION_OPTIONS or not was_set:
                continue
            if parameter.param_type_name == "argument":
                arguments += [raw] if isinstance(raw, str) else list(raw)
            else:
                flag = parameter.opts[0].removeprefix("--").partition("/")[0]
                options[flag] = self._convert(ctx, parameter, raw)
        return Call(ctx.info_name, arguments, options)

    def _convert(self, ctx: Any, parameter: Any, raw: Any) -> OptionValue:
        """Return the value of an option: a number or a truth value by the type of the option, otherwise its text."""
        if isinstance(raw, list | tuple):
            return [str(item) for item in raw]
        if parameter.type.name in ("int", "int range", "float", "float range", "boolean"):
            return cast("OptionValue", parameter.type_cast_value(ctx, raw))
        return str(raw)
