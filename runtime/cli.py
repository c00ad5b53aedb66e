"""The `dynrt` command: `serve` a model, be one `engine` process, `replay` a recorded trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dynrt.runtime.errors import DynrtError
from dynrt.runtime.replay.options import add_options as add_replay_options


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: ended in good order; 2: it could not work as asked; 1: it failed."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except DynrtError as error:
        print(f"dynrt: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dynrt", description="Serve a language model, prefill and decode apart, on one command."
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="start engines and an OpenAI-compatible endpoint"))
    _add_engine(commands.add_parser("engine", help="run one engine process that joins a runtime"))
    _add_front(commands.add_parser("front"))  # by the runtime alone: without help, it is not listed
    _add_replay(commands.add_parser("replay", help="serve a recorded trace in virtual time"))
    return parser


class _ShowVersion(argparse.Action):
    """Looked up only when asked for: reading package metadata takes longer than the rest of --help."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: object) -> None:
        from importlib.metadata import version

        print(f"dynrt {version('dynrt')}")
        parser.exit()


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        default="native",
        choices=("native", "sim", "vllm"),
        help="what computes; sim: nothing does, but time passes as if (default: native)",
    )
    parser.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="for vLLM's EngineArgs, VALUE as JSON or text; prefill:KEY or decode:KEY for one pool alone; repeatable",
    )
    parser.add_argument(
        "--sim-profile",
        default="llama-3.1-8b@h100",
        metavar="PROFILE",
        help="whose time sim keeps: MODEL@GPU, dynamo-mocker or a JSON file (default: llama-3.1-8b@h100)",
    )
    parser.add_argument(
        "--speedup",
        type=float,
        default=1.0,
        metavar="F",
        help="how much faster sim's time passes (default: 1)",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="of weights and KV cache (default: the fastest here)",
    )
    parser.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="where it computes (default: a GPU if there is one)",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads per engine (default: cores / engines)"
    )
    parser.add_argument(
        "--kv-blocks", type=int, metavar="N", help="size of each KV cache (default: by memory)"
    )
    parser.add_argument(
        "--max-batch-tokens",
        type=int,
        default=512,
        metavar="N",
        help="tokens computed in one step (default: 512)",
    )
    parser.add_argument(
        "--max-batch-requests", type=int, default=64, metavar="N", help="requests in one step (default: 64)"
    )
    _add_transfer_options(parser)


def _add_transfer_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv-connector",
        default="layerwise",
        choices=("layerwise", "nixl-pull"),
        help="what moves KV: our push, or vLLM's own NixlConnector, for --engine vllm (default: layerwise)",
    )
    parser.add_argument(
        "--verify-kv",
        action="store_true",
        help="check that all KV arrives as it was sent, by checksums; slow, host memory only",
    )
    parser.add_argument(
        "--nixl-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="NIXL backend that carries the KV, such as UCX or LIBFABRIC; may be given several times (default: UCX)",
    )
    parser.add_argument(
        "--ucx",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of UCX for the engines, such as UCX_NET_DEVICES=mlx5_0:1; may be given several times",
    )


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="Hugging Face directory, GGUF file, hub id or alias (default: smollm2-135m)",
    )
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill engines (default: 1)")
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="decode engines (default: 1)")
    _add_model_options(parser)
    _add_endpoint_options(parser)
    parser.add_argument(
        "--local-prefill",
        default="auto",
        choices=("auto", "never", "always"),
        help="prefill on the decode engine: by cost, never or always (default: auto)",
    )
    parser.add_argument(
        "--max-ttft",
        type=float,
        metavar="S",
        help="refuse requests whose first token is expected later than in S seconds (default: none)",
    )
    parser.add_argument(
        "--max-waiting-requests",
        type=int,
        default=1024,
        metavar="N",
        help="requests that may wait for their first token on one engine (default: 1024)",
    )
    parser.add_argument(
        "--index-memory",
        type=float,
        default=256.0,
        metavar="MB",
        help="megabytes for what is known of the engines' prefix caches (default: 256)",
    )
    parser.add_argument(
        "--control",
        metavar="ADDRESS",
        help="where engines join, ipc://PATH or tcp://HOST:PORT (default: a private directory)",
    )
    parser.add_argument(
        "--otel",
        metavar="URL",
        help="OTLP receiver (HTTP) that gets a trace of each request (default: $OTEL_EXPORTER_OTLP_ENDPOINT, or none)",
    )
    _add_log_option(parser)
    parser.set_defaults(run=_serve)


def _add_log_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        help="of the log on standard error, one line an event (default: text)",
    )


def _add_endpoint_options(parser: argparse.ArgumentParser) -> None:
    endpoint = parser.add_argument_group(
        "endpoint", "API keys also come from the variable DYNRT_API_KEYS, separated by commas."
    )
    endpoint.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    endpoint.add_argument("--port", type=int, default=8000, help="port to listen on, 0: any (default: 8000)")
    endpoint.add_argument(
        "--frontends",
        type=int,
        default=1,
        metavar="N",
        help="processes that share the port and answer requests; 1: the runtime's own (default: 1)",
    )
    endpoint.add_argument("--uds", metavar="PATH", help="listen on a unix socket instead of a port")
    endpoint.add_argument(
        "--uds-mode",
        type=_file_mode,
        default=0o600,
        metavar="MODE",
        help="who may open that socket, as for chmod (default: 600)",
    )
    endpoint.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="API keys that are taken, one a line; read again when it changes",
    )
    endpoint.add_argument(
        "--allow-unauthenticated",
        action="store_true",
        help="listen beyond this machine without any API key",
    )
    endpoint.add_argument("--open-metrics", action="store_true", help="serve /metrics without an API key")
    endpoint.add_argument(
        "--tls-cert", metavar="FILE", help="PEM certificate chain; read again when it changes and at SIGHUP"
    )
    endpoint.add_argument("--tls-key", metavar="FILE", help="its private key, PEM without a password")
    endpoint.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web pages that may call, such as https://chat.example, or *; repeat for several (default: none)",
    )
    endpoint.add_argument(
        "--tool-parser",
        metavar="NAME",
        help="format of the model's tool calls: hermes, llama3_json, mistral or none (default: by its chat template)",
    )
    endpoint.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="format of its reasoning: qwen3, deepseek_r1, mistral, seed_oss, kimi or none (default: likewise)",
    )


def _file_mode(text: str) -> int:
    mode = int(text, 8)
    if not 0 <= mode <= 0o777:
        raise ValueError
    return mode


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="as for `dynrt serve`")
    parser.add_argument(
        "--join", required=True, metavar="ADDRESS", help="control address that the runtime logs"
    )
    parser.add_argument(
        "--role",
        default="both",
        choices=("prefill", "decode", "both"),
        help="what the runtime uses it for (default: both)",
    )
    _add_model_options(parser)
    _add_log_option(parser)
    # From the runtime to the engines that it spawns:
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    parser.add_argument("--spawn-token", default="", help=argparse.SUPPRESS)
    parser.add_argument("--lifeline", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(run=_engine)


def _add_front(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lifeline", type=int, required=True, help=argparse.SUPPRESS)
    parser.set_defaults(run=_front)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    add_replay_options(parser)
    parser.set_defaults(run=_replay)


def _serve(arguments: argparse.Namespace) -> int:
    from dynrt.runtime.serve import serve

    return serve(arguments)


def _engine(arguments: argparse.Namespace) -> int:
    from dynrt.engines.lifeline import hold_lifeline

    if arguments.lifeline is not None:
        hold_lifeline(arguments.lifeline)  # before anything slow: the runtime may already be gone
    from dynrt.engines.main import run_engine

    return run_engine(arguments)


def _front(arguments: argparse.Namespace) -> int:
    from dynrt.engines.lifeline import hold_lifeline

    hold_lifeline(arguments.lifeline)
    from dynrt.runtime.fronts.process import run_front

    return run_front()


def _replay(arguments: argparse.Namespace) -> int:
    from dynrt.runtime.replay.command import run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
