"""URLs that must lead nowhere, in every spelling that some parser or resolver understands.

PORT stands for a port that is allowed on public hosts, so that only the address can be what is refused.
"""

import socket
from ipaddress import ip_address

from espalier_egress.addresses import Address
from espalier_egress.errors import EgressUnreachable

INNER_NAMES = frozenset(("localhost", "inner.example", "metadata.google.internal", "printer"))
"""Names that resolve to the machine itself: by its hosts file, a search domain, or somebody's DNS."""

LOOPBACK = """
http://127.0.0.1:PORT/
HTTP://127.0.0.1:PORT/
hTTp://127.0.0.1:PORT/
http://127.0.0.2:PORT/
http://127.255.255.254:PORT/
http://localhost:PORT/
http://LOCALHOST:PORT/
http://localhost.:PORT/
http://127.0.0.1.:PORT/
http://inner.example:PORT/
http://inner.example.:PORT/
http://INNER.EXAMPLE:PORT/
http://printer:PORT/
http://2130706433:PORT/
http://02130706433:PORT/
http://017700000001:PORT/
http://0x7f000001:PORT/
http://0X7F000001:PORT/
http://0x7f.0.0.1:PORT/
http://0x7f.0x0.0x0.0x1:PORT/
http://0177.0.0.1:PORT/
http://0177.0.0.01:PORT/
http://00000177.0.0.1:PORT/
http://127.1:PORT/
http://127.0.1:PORT/
http://127.000.000.001:PORT/
http://0x7f.1:PORT/
http://127.0.0.0x1:PORT/
http://6425673729:PORT/
http://127.0.0.1%00:PORT/
http://127.0.0.1%2f:PORT/
http://%31%32%37.0.0.1:PORT/
http://127%2e0%2e0%2e1:PORT/
http://0.0.0.0:PORT/
http://0:PORT/
http://0.1.2.3:PORT/
http://[::1]:PORT/
http://[0:0:0:0:0:0:0:1]:PORT/
http://[0000:0000:0000:0000:0000:0000:0000:0001]:PORT/
http://[::]:PORT/
http://[::ffff:127.0.0.1]:PORT/
http://[::ffff:7f00:1]:PORT/
http://[::FFFF:7F00:0001]:PORT/
http://[0:0:0:0:0:ffff:127.0.0.1]:PORT/
http://[::127.0.0.1]:PORT/
http://[::ffff:0:127.0.0.1]:PORT/
http://[::1%25lo]:PORT/
http://[::1%lo]:PORT/
http://[fe80::1%25eth0]:PORT/
http://[::1.]:PORT/
http://[127.0.0.1]:PORT/
http://[v1.127.0.0.1]:PORT/
http://::1:PORT/
""".split()

OTHER_NETWORKS = """
http://10.0.0.1:PORT/
http://10.255.255.255:PORT/
http://172.16.0.1:PORT/
http://172.31.255.255:PORT/
http://192.168.1.1:PORT/
http://100.64.0.1:PORT/
http://100.100.100.200:PORT/latest/meta-data/
http://169.254.169.254:PORT/latest/meta-data/
http://169.254.170.2:PORT/
http://metadata.google.internal:PORT/computeMetadata/v1/
http://2852039166:PORT/
http://0xa9fea9fe:PORT/
http://0251.0376.0251.0376:PORT/
http://168.63.129.16:PORT/
http://192.0.0.192:PORT/
http://192.0.2.1:PORT/
http://192.88.99.1:PORT/
http://198.18.0.1:PORT/
http://198.51.100.1:PORT/
http://203.0.113.1:PORT/
http://224.0.0.1:PORT/
http://239.255.255.250:PORT/
http://240.0.0.1:PORT/
http://255.255.255.255:PORT/
http://[fc00::1]:PORT/
http://[fd00:ec2::254]:PORT/
http://[fd20:ce::254]:PORT/
http://[fe80::1]:PORT/
http://[febf::1]:PORT/
http://[fec0::1]:PORT/
http://[ff02::1]:PORT/
http://[64:ff9b::7f00:1]:PORT/
http://[64:ff9b::127.0.0.1]:PORT/
http://[64:ff9b:1::7f00:1]:PORT/
http://[2002:7f00:1::]:PORT/
http://[2002:7f00:0001::1]:PORT/
http://[2001:0:4136:e378:8000:63bf:80ff:fffe]:PORT/
http://[2001:db8::1]:PORT/
http://[3fff::1]:PORT/
http://[100::1]:PORT/
http://[2606:4700::5efe:7f00:1]:PORT/
http://[2606:4700::200:5efe:7f00:1]:PORT/
""".split()

TRICKS = [
    "http://user@127.0.0.1:PORT/",
    "http://user:password@93.184.216.34:PORT/",
    "http://93.184.216.34@127.0.0.1:PORT/",
    "http://127.0.0.1:PORT@93.184.216.34/",
    "http://93.184.216.34\\@127.0.0.1:PORT/",
    "http://93.184.216.34:80@127.0.0.1:PORT/",
    "http://@127.0.0.1:PORT/",
    "http://127.0.0.1:PORT\\.example.com/",
    "http://127.0.0.1:PORT#@93.184.216.34/",
    "http://127.0.0.1:PORT?@93.184.216.34/",
    "http://\u2460\u2461\u2466.\u24ea.\u24ea.\u2460:PORT/",
    "http://\uff11\uff12\uff17.0.0.1:PORT/",
    "http://\uff11\uff12\uff17\uff0e\uff10\uff0e\uff10\uff0e\uff11:PORT/",
    "http://127\u30020\u30020\u30021:PORT/",
    "http://127\uff610\uff610\uff611:PORT/",
    "http://\u24db\u24de\u24d2\u24d0\u24db\u24d7\u24de\u24e2\u24e3:PORT/",
    "http://\uff4c\uff4f\uff43\uff41\uff4c\uff48\uff4f\uff53\uff54:PORT/",
    "http://local\u00adhost:PORT/",
    "http://local\u200bhost:PORT/",
    "http://\u0663\u0662.\u0660.\u0660.\u0661:PORT/",
    "http://127.0.0.1:PORT\t/",
    "ht\ttp://127.0.0.1:PORT/",
    "http://127.0.0.1\n:PORT/",
    "http://127.\r\n0.0.1:PORT/",
    "\nhttp://127.0.0.1:PORT/",
    " http://127.0.0.1:PORT/",
    "http:// 127.0.0.1:PORT/",
    "http://127.0.0.1 :PORT/",
    "http://127.0.0.1\x00.example.com:PORT/",
    "http://127.0.0.1\u2028:PORT/",
    "http:\\\\127.0.0.1:PORT\\",
    "http:/127.0.0.1:PORT/",
    "http:127.0.0.1:PORT/",
    "http:///127.0.0.1:PORT/",
    "//127.0.0.1:PORT/",
    "127.0.0.1:PORT/",
    "localhost:PORT",
    "/etc/passwd",
    "",
    "http://",
    "http://:PORT/",
    "http://.:PORT/",
    "http://..:PORT/",
    "http://-:PORT/",
    "http://a..b:PORT/",
    "http://" + "a" * 64 + ".example:PORT/",
    "http://" + "a." * 127 + "example:PORT/",
    "http://93.184.216.34:PORT/" + "a" * 8192,
    "http://\ud800:PORT/",
    "http://93.184.216.34:0/",
    "http://93.184.216.34:65536/",
    "http://93.184.216.34:99999999999999999999/",
    "http://93.184.216.34:-1/",
    "http://93.184.216.34:PORTx/",
    "http://93.184.216.34:22/",
    "http://93.184.216.34:6379/",
    "https://93.184.216.34:8443/",
    "http://[93.184.216.34]:PORT/",
    "http://[2606:4700::1]:22/",
    "http://[::1/",
    "http://::1]/",
    "file:///etc/passwd",
    "file://127.0.0.1:PORT/etc/passwd",
    "gopher://127.0.0.1:PORT/_GET%20/",
    "ftp://127.0.0.1:PORT/",
    "dict://127.0.0.1:PORT/info",
    "unix:///run/docker.sock",
    "http+unix://%2Frun%2Fdocker.sock/",
    "ws://93.184.216.34:PORT/",
    "wss://93.184.216.34:PORT/",
    "jar:http://127.0.0.1:PORT!/",
    "data:text/plain,hello",
    "javascript:alert(1)",
    "view-source:http://127.0.0.1:PORT/",
    "httpx://93.184.216.34:PORT/",
    "http ://93.184.216.34:PORT/",
]

FORBIDDEN = [*LOOPBACK, *OTHER_NETWORKS, *TRICKS]


def resolved_like_libc(host: str) -> list[Address]:
    """What a system's resolver makes of a host: it knows inner names, and numbers in all their spellings."""
    if host.rstrip(".") in INNER_NAMES:
        return [ip_address("127.0.0.1")]
    try:
        return [ip_address(socket.inet_aton(host.rstrip(".")))]
    except OSError:
        raise EgressUnreachable from None
