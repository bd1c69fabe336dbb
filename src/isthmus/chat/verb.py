"""`isthmus chat`: a conversation in the terminal, with a model in this process or on a running server."""

from __future__ import annotations

import argparse
import os

from isthmus.chat.turns import Conversation, Speaker
from isthmus.errors import ConfigError
from isthmus.flags import Parser, add_engine_flags, add_sampling_flags, engine_args, engine_settings, sampling_params
from isthmus.params import SamplingParams


def add_parser(verbs: argparse._SubParsersAction[Parser]) -> None:
    """The verb and its flags."""
    parser = verbs.add_parser("chat", help="talk with a model in the terminal, here or on a running server")
    add_engine_flags(parser)
    talk = parser.add_argument_group("conversation")
    talk.add_argument("--system", metavar="TEXT", help="a system message before everything else")
    talk.add_argument("--quiet", action="store_true", help="answers alone: no counts and no notes")
    server = parser.add_argument_group("a running server instead of MODEL")
    server.add_argument("--url", metavar="URL", help="where OpenAI's chat API is served, such as http://127.0.0.1:8000")
    server.add_argument("--api-key", metavar="KEY", help="default: ISTHMUS_API_KEY")
    server.add_argument("--served-model-name", metavar="NAME", help="default: the first model it offers")
    add_sampling_flags(parser.add_argument_group("sampling"), max_tokens=None)  # type: ignore[arg-type]
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends. Exit codes are those of `cli.main`."""
    from isthmus.chat.session import Session  # noqa: PLC0415

    params = sampling_params(args)
    if params.n != 1:
        raise ConfigError("--n: a turn has one answer: leave it out")
    speaker = _server(args, params) if args.url is not None else _engine(args, params)
    return Session(speaker, Conversation(args.system), quiet=args.quiet).run()


def _engine(args: argparse.Namespace, params: SamplingParams) -> Speaker:
    for flag, value in (("--api-key", args.api_key), ("--served-model-name", args.served_model_name)):
        if value is not None:
            raise ConfigError(f"{flag} is for a server: give --url too, or leave it out")
    settings = engine_args(args)
    from isthmus.chat.engine import EngineSpeaker  # noqa: PLC0415 (torch: not for --help)

    return EngineSpeaker(settings, params)


def _server(args: argparse.Namespace, params: SamplingParams) -> Speaker:
    given = [setting.flag for name, (setting, _) in engine_settings().items() if hasattr(args, name)]
    if given or args.config is not None:
        flag = given[0] if given else "--config"
        raise ConfigError(f"{flag.upper() if flag == 'model' else flag} is for a model in this process, not for --url")
    from isthmus.chat.server import ServerSpeaker  # noqa: PLC0415
    from isthmus.endpoint import Endpoint  # noqa: PLC0415

    endpoint = Endpoint(args.url, args.api_key or os.environ.get("ISTHMUS_API_KEY"))
    return ServerSpeaker(endpoint, args.served_model_name, params)
