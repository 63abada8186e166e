"""gRPC channel arguments for our servers, and for channels to them.

Both ends must agree on keepalive: a channel that pings more often than its server allows is cut off with "too many pings" in
the middle of a long silent call, and one that does not ping hangs for minutes on a peer that was stopped or cut off. Our servers
allow every rate, and our channels ping often. Pings are answered by gRPC's own threads: a process that is busy, even one that
holds the interpreter lock, answers; one that is stopped does not.
"""

from __future__ import annotations

from stage_runtime.config import ServerSettings

# An idle server connection is asked this often whether its client is still there, and closed without an answer in time.
SERVER_KEEPALIVE_TIME_S = 10.0
SERVER_KEEPALIVE_TIMEOUT_S = 10.0

Options = list[tuple[str, int]]


def server_options(settings: ServerSettings) -> Options:
    """Arguments of a server: message limits, exclusive ports, keepalive."""
    return [
        # Otherwise a second server silently shares the port.
        ("grpc.so_reuseport", 0),
        *_message_limits(settings.max_message_bytes),
        # Clients may ping as often as they like, also without calls and during silent calls; 0 strikes: never punished.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 100),
        *_keepalive(SERVER_KEEPALIVE_TIME_S, SERVER_KEEPALIVE_TIMEOUT_S),
    ]


def channel_options(  # noqa: PLR0913 - options by name, with defaults
    max_message_bytes: int,
    *,
    keepalive_time_s: float = 2.0,
    keepalive_timeout_s: float = 3.0,
    max_reconnect_backoff_s: float = 5.0,
    local_subchannel_pool: bool = False,
    http_proxy: bool = False,
) -> Options:
    """Arguments of a channel to one of our servers.

    Args:
        max_message_bytes: Largest message in either direction; the server's `max_message_bytes`.
        keepalive_time_s: The server is pinged when it was silent this long, also without calls. A silent server is thus noticed
            within `keepalive_time_s + keepalive_timeout_s`: its calls end with UNAVAILABLE.
        keepalive_timeout_s: A ping without answer for this long means that the connection is dead.
        max_reconnect_backoff_s: Longest wait between two attempts to connect.
        http_proxy: True: obey `http_proxy` and its like of the environment. gRPC would send even loopback traffic there.
        local_subchannel_pool: True: a connection of its own; False: shared with channels of equal target and arguments.
    """
    return [
        *_message_limits(max_message_bytes),
        ("grpc.keepalive_permit_without_calls", 1),
        *_keepalive(keepalive_time_s, keepalive_timeout_s),
        ("grpc.initial_reconnect_backoff_ms", min(250, _ms(max_reconnect_backoff_s))),
        ("grpc.max_reconnect_backoff_ms", _ms(max_reconnect_backoff_s)),
        ("grpc.use_local_subchannel_pool", int(local_subchannel_pool)),
        ("grpc.enable_http_proxy", int(http_proxy)),
    ]


def _message_limits(max_message_bytes: int) -> Options:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]


def _keepalive(time_s: float, timeout_s: float) -> Options:
    return [
        ("grpc.keepalive_time_ms", _ms(time_s)),
        ("grpc.keepalive_timeout_ms", _ms(timeout_s)),
        # The time-out of every ping; its default of a minute wins over keepalive_timeout_ms.
        ("grpc.http2.ping_timeout_ms", _ms(timeout_s)),
        # 0: go on pinging during calls that carry no data.
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
