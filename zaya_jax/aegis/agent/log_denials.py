r"""Phrases of a log line that deny a fault: negations, zero counts, and states such as "none" or "inactive".

Rules search a line without these phrases, so that no rule needs its own exceptions. A phrase is removed only
if it denies a word for a fault: "no space left on device", "no route to host" and "not responding" describe
faults by a negation, and stay. The rest of the line stays as well: in "0 correctable errors, 3 uncorrectable
errors" the second half is a fault.

Patterns are verbose: spaces in them are layout, and `\ ` is a space of the line.
"""

import re


def _any(words: str) -> str:
    """A group of alternatives: regular expressions between spaces, with "~" for a space of the line."""
    return f"(?:{'|'.join(words.split())})".replace("~", r"\ ")


# Words that name a fault, in the logs of kernels, drivers, RCCL, NICs, file systems and schedulers.
_FAULT_WORDS = _any(
    r"""err(?:or)?s? faults? failures? fail(?:s|ed|ing)? timeouts? (?:time|timed|timing)[-~]outs? resets?
    hangs? hung hanging ues? ces? (?:un|non-?)?correct(?:able|ed) (?:non-?)?fatal critical poison\w*
    throttl\w* thermal\w* over-?~?(?:temp\w*|heat\w*|runs?|flows?) hot slowdowns? violations? crash\w*
    panics? oops\w* seg-?faults? (?:soft|hard)?~?lockups? corrupt\w* abort\w* exceptions? warnings?
    alarms? s?xids? dbes? sbes? ecc crc mces? degrad\w* trip(?:s|ped)? retire\w* remap\w* bad unstable
    skew\w* stepped offline\w* stall\w* stale stuck los[st] loss(?:es)? drop(?:s|ped)? retr(?:y|ies)
    retrans\w* disconnect\w* unreachable evict\w* preempt\w* oom\w* kill(?:s|ed|ings?)? down flap\w*
    unhealthy blocked problems? issues? nans? infs? non-?finite leaks? discard\w* collisions?
    mismatch\w* miss(?:es|ed) anomal\w* stragglers? invalid halt(?:s|ed)? incidents?"""
)
# Plurals are counted more freely than singulars: "errors on GPU 3: 0" is a count, "error on port: 0" is not.
_PLURAL_WORDS = _any(
    r"""err(?:or)?s faults failures timeouts (?:time|timing)[-~]outs resets hangs ues ces violations
    crashes panics oops(?:es)? seg-?faults lockups exceptions warnings alarms s?xids dbes sbes mces
    losses drops retries retransmi\w+s disconnects evictions kills flaps problems issues nans infs
    leaks discards collisions misses mismatches stragglers retirements overruns aborts"""
)
# Words whose 0 is a name: "error on port: 0" counts nothing.
_PLACE = _any(
    r"""addr\w* at errno rc ret retval rv bank block bus card channel code core cpu device dev die disk
    gpu hca host hub id index ip lane lba line link mc node numa offset opcode page partition pid pod
    port process qid qp queue rank ring row seq session sector slot socket src_id status step task
    thread tid try type vf vmid volume worker xcd"""
)
# Words that begin another phrase, or name what is missing, as in "no response from GPU error".
_OTHER_PHRASE = _any(
    r"""from on to for before after within in by at with due because while until but such space room route
    response reply answer ack acknowledg\w+ completion(?!~err) not is are was were left longer more
    matching valid"""
)
# Participles that say that a fault was there, and with "not" deny it.
_FOUND = _any(
    r"""detected found seen observed reported active present triggered asserted tripped required needed
    occur\w* record\w* logged exceeded reached raised engaged encountered noticed happen\w* applied
    pending"""
)
# Words between a fault and its count, as in "error count total: 0".
_COUNTED = _any(
    rf"""counts? counters? cnt totals? events? rates? entries so~far {_FOUND} pages page~counts? limit
    status state flags? now time packets? frames? sum"""
)
# Parts of a system that look for faults: "ECC monitoring enabled" reports none.
_FACILITY = _any(
    r"""checks? checking tests? testing scans? scanning polling monitor(?:ing)? detection detector
    handling handlers? reporting recovery logging collector thresholds? injection counters? policy
    support driver containment interrupts? notification protection scrubb(?:ing|er) decoding values?
    limits? timers?"""
)
# What is said of such a part when it works.
_WORKS = _any(
    r"""enabled disabled initiali[sz]ed started passed registered loaded ok complete\w* available
    configured set~to supported on off unchanged finished ready active"""
)
# Values that mean "no fault", as in "thermal slowdown: not active".
_NO_FAULT = _any(
    r"""(?:state|status)~healthy\b none nil no no[_-]err\w* never n/?a false off ok(?:ay)? pass(?:ed)?
    good normal cleared? disabled inactive healthy (?:state~)?de-?assert\w*
    not~(?:active|detected|found|present|triggered|set|asserted|applicable|required|needed|seen|observed)
    --?"""
)
# Words that "not" denies. With other words, as in "not reset" or "not corrected", it may state a fault.
_SPARED = _any(
    r"""fail(?:ed|ing|ure)? tim(?:e|ed|ing)~out hang(?:ing)? hung crash(?:ed|ing)? throttl(?:e|ed|ing)
    los[te] drop(?:ped)? down evicted degraded corrupt(?:ed)? overheat(?:ed|ing)? killed preempted
    stalled stuck stale fatal critical exceed(?:ed)? unstable unhealthy stepped flap(?:ped|ping)?
    skewed in~error an?~(?:error|fault)"""
)

# A word for a fault, also at the beginning or the end of a name such as ue_count or rx_crc_errors.
_FAULT = rf"(?<![A-Za-z0-9]){_FAULT_WORDS}(?:_\w{{1,40}})?(?![A-Za-z0-9])"
_FAULTS = rf"{_FAULT}(?:\ {_FAULT}){{0,5}}"
_PLURAL = rf"(?<![A-Za-z0-9]){_PLURAL_WORDS}(?:_\w{{1,40}})?(?![A-Za-z0-9])"
_BETWEEN = rf"(?:(?!{_OTHER_PHRASE}\b)[\w/+%-]+\ +)"
_BE = r"(?:(?:is|are|was|were|has|have|had|went|ran)\ +(?:been\ +)?)?"
_NOT = "n['\\u2019]t"
# Not zero counts: "0x10", "0.5", "0:12" and "0 bytes free"; "0 of 8 ranks arrived" is a fault.
_ZERO = r"""(?<!\w)(?<!\d\.)(?<!fault_status:)(?:0+(?:\.0+)?|0x0+)(?:\ ?%|/s)?(?![\w:%]|\.\d
    |\ (?:\w*bytes?|[kmgt]i?b|blocks|inodes)\b
    |\ (?:out\ )?of\ \d+\ (?:bytes|[\w-]+\ (?:arrived|joined|answered|respond\w*|ready|connected|left
    |remain\w*|complete\w*|succe\w+|pass\w*|reached|ok|up|alive|healthy)\b))"""
_NONE = rf"""{_NO_FAULT}(?=\s*$|\s*[^\w\s(:=]|\s+\w+\s*[=:]
    |\s+(?:\(|pending|found|detected|reported|seen|active|present))"""
_VALUE = rf"""["']?(?:{_ZERO}|{_NONE})"""
_NUMBER = r"(?:0|0/\d+|0\ (?:out\ )?of\ \d+)\ +(?!\d)"
_ITEM = rf"(?!(?:but|no|not|[1-9])\b){_BETWEEN}{{0,3}}{_FAULTS}"
# Further faults that a negation denies; after a comma alone another statement may begin.
_LIST = rf"(?:(?:\s*,\s*{_ITEM})*,?\s*(?:\b(?:or|nor|and)\b|/)\s*{_ITEM})?"

_DENIALS = (
    # "errors on GPU 3: 0", "resets since boot = none"; but "error on port: 0" names a port
    rf"""{_PLURAL}(?:\ +[\w/%#.-]+){{1,6}}["']?(?:\s*:|\ +=)\s*{_VALUE}""",
    rf"""{_FAULT}(?:\ +(?!{_PLACE}\s*[:=])[\w/%#.-]+){{1,3}}(?<!\ \d)["']?(?:\s*:|\ +=)\s*{_VALUE}""",
    # "error count is 0", "rx_crc_errors: 0", "thermal slowdown: not active"
    rf"""{_FAULT}(?:\ +(?:{_FAULT}|{_COUNTED})){{0,4}}\)?["']?\s*
    (?:[:=|]+|\.{{3,}}|->|\bis\b|\bare\b|\bwas\b|\bwere\b)\s*{_VALUE}""",
    # "errors 0", "errors found ...... 0"
    rf"""{_FAULT}(?:\ +(?:pages|page\ counts?|counts?|counters?|totals?|events?|{_FOUND})){{0,2}}[\s.|]+
    {_ZERO}(?!\s+[1-9]\d*\s|\ (?:m?s|seconds?)\b)""",
    # "no uncorrectable or correctable errors", "without any error", "none of the 8 GPUs reported faults"
    rf"""\b(?<!-)(?:no|without|zero|never|neither|nor|free\ (?:of|from)|none(?:\ of(?:\ the)?)?|nothing)
    \b(?!-)\ +{_BETWEEN}{{0,5}}{_BE}{_FAULTS}{_LIST}""",
    # "0 new uncorrectable errors", "0 of 8 links down"; but neither "GPU 0 failed" nor "die: 0 5 errors"
    rf"(?<![\w.:=/-])(?<!\w\ ){_NUMBER}{_BETWEEN}{{0,3}}{_BE}{_FAULTS}",
    # The same after a colon, and after words that do not name a place.
    rf"""(?:(?<=:\ )|(?<=\bof\ )|(?<=\b(?:and|had|has|are|was|got|saw|ran|sum)\ )
    |(?<=\b(?:with|have|find|show|were)\ )|(?<=\b(?:found|total|shows)\ )|(?<=\b(?:logged|passed)\ )
    |(?<=\b(?:reported|detected)\ ))
    {_NUMBER}{_BETWEEN}{{0,3}}(?:{_PLURAL}|(?:were|are|was|is|had)\ {_FAULT})""",
    # "is not throttled", "did not time out", "no longer degraded"
    rf"""(?:\b(?:is|are|was|were|has|have|had|did|does|do|been|being)\ not|\b\w{{1,12}}{_NOT}
    |\bnever|\bno\ longer|\bnot)\ +
    (?:(?:yet|currently|been|be|being|due\ to|in|a|an|the|to|seem|appear|considered|affected\ by)\ +){{0,3}}
    {_SPARED}\b""",
    # "does not report any errors"
    rf"(?:\bnot|{_NOT}|\bcannot|\bnever)\ +(?:\w+\ +){{0,3}}any\ +{_BETWEEN}{{0,4}}{_FAULTS}{_LIST}",
    # "thermal throttling was not detected", "GPU reset not required"
    rf"""{_FAULTS}(?:\ +(?:threshold|limit|events?|condition|state))?
    (?:\ +(?:on|in|for|at|of|from)(?:\ [\w:.-]+){{1,3}}?)?
    (?:\ +(?:is|are|was|were|has|have|had|did|does))?(?:\ +not|\ *{_NOT}|\ +never)
    (?:\ +(?:been|currently|yet|be|being))*\ +{_FOUND}\b""",
    # "errors cleared", "recovered from a timeout"
    rf"""{_FAULTS}(?:\ +[\w/#.-]+){{0,4}}?(?:\ +(?:has|have|was|were|is|are|been|now|all))*
    (?<!\bnot)(?<!\bnever)(?<!\bto)(?<!\bbe)\ +
    (?:cleared|resolved|recovered|healed|subsided|released|deasserted|ended)\b""",
    rf"(?<!\bnot\ )(?<!\bto\ )\b(?:cleared|recovered(?:\ from)?)\ +{_BETWEEN}{{0,4}}{_FAULTS}",
    # "retired pages: no bad pages": a heading of a denied phrase; twice, because headings may be nested
    *[rf"{_FAULT}(?:\ +[\w-]+){{0,3}}\s*[:=]\s*(?:[\w-]+\ +){{0,3}}\x1f"] * 2,
    # "mounted, errors=remount-ro"
    r"\berrors=(?:remount-ro|continue|panic)\b",
    rf"{_FAULT}-free\b",
    # "error reporting enabled", "thermal throttling monitor started": a facility, not a fault
    rf"""{_FAULT}(?:\ +[\w/-]+){{0,3}}\ +{_FACILITY}(?:\ +(?:is|are|was|were|has\ been))?[:\s]+
    (?:now\ )?{_WORKS}\b""",
    rf"""\b(?:monitor|check|watch|poll|scan|listen|test|look)(?:ing|e?s)?\ +for\ +
    {_BETWEEN}{{0,4}}{_FAULTS}{_LIST}""",
    rf"""\b(?:enabl(?:e|ed|ing)|disabl(?:e|ed|ing)|register(?:ed|ing)|initializ(?:ed|ing))\ +
    {_BETWEEN}{{0,4}}{_FAULTS}(?:\ +(?:{_FACILITY}|events?))?(?=\s*(?:$|[.,;)]|on\b|for\b|by\b))""",
    rf"\b(?:to\ (?:avoid|prevent|survive)|in\ case\ of|protect\w*\ against)\ +{_BETWEEN}{{0,4}}{_FAULT}",
)
_COMPILED = tuple(re.compile(denial, re.IGNORECASE | re.VERBOSE) for denial in _DENIALS)
# Denials next to the match of a rule, which need no word for a fault because the rule has found it.
_DENIED_BEFORE = re.compile(
    rf"""(?:\b(?<!-)(?:no|zero|without|never|neither|nor|not\ an?)\ +{_BETWEEN}{{0,2}}["'`]?
    |(?:\b(?:is|are|was|were|has|have|had|did|does)\ not|\b\w{{1,12}}{_NOT}|\bno\ longer)
    \ +(?:(?:been|yet)\ +)?)\Z""",
    re.IGNORECASE | re.VERBOSE,
)
_DENIED_WITHIN = re.compile(
    rf"(?<=.)\b(?<!-)(?:no|zero|without)\ +{_BETWEEN}{{0,3}}[\w-]+\Z", re.IGNORECASE | re.VERBOSE
)
_DENIED_AFTER = re.compile(
    rf"""\w*(?:\ +(?:counts?|counters?|events?|errors?|total|faults?))*["']?
    (?:[\s.]*[:=|]+[\s.]*(?:{_ZERO}|{_NONE})|\ +{_ZERO}(?:\ (?:seconds?|events?|times))?(?=\s*(?:$|[,;]))
    |[:\s]+(?:(?:is|are|was|were|has|have|did)\ +)?(?:not|never)\ +(?:been\ +)?{_FOUND}\b)""",
    re.IGNORECASE | re.VERBOSE,
)


def without_denials(line: str) -> str:
    """Removes the phrases that deny a fault.

    Args:
      line: line of a log, of bounded length.

    Returns:
      The line, with a mark in the place of each phrase.
    """
    # The order matters: later patterns, such as that of headings, match the marks of earlier ones.
    for denial in _COMPILED:
        # The mark is neither a word nor a space, so that no pattern matches across it.
        line = denial.sub("\x1f", line)
    return line


def is_denied(match: re.Match[str]) -> bool:
    """Returns whether the words next to a match deny it, as in "SIGSEGV=0" or "no stale handle".

    A negation at the beginning of the match belongs to what the rule searches, as in "no ROCm-capable
    device".
    """
    before = match.string[max(match.start() - 80, 0) : match.start()]
    return bool(
        _DENIED_BEFORE.search(before)
        or _DENIED_WITHIN.search(match[0][-80:])
        or _DENIED_AFTER.match(match.string, match.end())
    )
