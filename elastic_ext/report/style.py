"""How a report looks, and what its page does where scripts may run."""

from __future__ import annotations

import json
from collections.abc import Mapping

from .axes import LEFT, RIGHT, WIDTH, Column, TimeColumns, middle
from .charts import NUM_COLOURS
from .markup import LABELS, ORDER, amount, elapsed_in_words, percent, seconds_in_words
from .record import RunRecord

__all__ = ["script", "style"]


# --- how a report looks: light and dark, on a screen and on paper ----------------------------------------------------
# The colours can be told apart by people with colour blindness.

_LIGHT: Mapping[str, str] = {
    "page": "#ffffff", "card": "#f6f7f9", "ink": "#1b1f24", "soft": "#5b6470", "rule": "#d9dde3", "grid": "#e7eaee",
    "accent": "#1f5fa8", "band": "#1f5fa822", "ground": "#eceff3", "config-0": "#cfe0f3", "config-1": "#a9c7e8",
    "remark-0": "#f7dfc0", "remark-1": "#f0cb98", "hatching": "#ffffff99", "failure": "#b3261e",
    "line-b": "#c2571a",
}  # fmt: skip
_DARK: Mapping[str, str] = {
    "page": "#14171b", "card": "#1d2127", "ink": "#e8eaed", "soft": "#a2abb6", "rule": "#363c45", "grid": "#282d34",
    "accent": "#7db3ec", "band": "#7db3ec2e", "ground": "#20252b", "config-0": "#27415f", "config-1": "#34567e",
    "remark-0": "#5b4320", "remark-1": "#755526", "hatching": "#00000080", "failure": "#ff8a80",
    "line-b": "#f0975a",
}  # fmt: skip
_ENTRIES: Mapping[str, tuple[str, str]] = {
    # the colour, and that of words on it
    "forward": ("#1f5fa8", "#fff"), "backward": ("#4f93d2", "#0b1a2b"), "optimizer": ("#8fc1ec", "#0b1a2b"),
    "transfer": ("#12406f", "#fff"), "step": ("#6aa9de", "#0b1a2b"), "communication": ("#7f63b8", "#fff"),
    "other": ("#a9b6c6", "#16202b"), "data": ("#eda32a", "#2b1c00"), "agreement": ("#c8b7e6", "#231437"),
    "checkpoint": ("#1a9173", "#fff"), "change": ("#e6d84a", "#2a2700"), "membership": ("#9bbf3b", "#1c2600"),
    "rolled-back": ("#e2754a", "#2b0f00"),
    "again": ("#c44a1c", "#fff"), "startup": ("#8b8f96", "#fff"), "restart": ("#9e3d5e", "#fff"),
    "unseen": ("#6b2b3f", "#fff"), "outside": ("#bfd8c9", "#13261b"), "stopped": ("#c3c7cd", "#20242a"),
}  # fmt: skip
_HEAT = ("#00224e", "#1b3a6b", "#3f4d6d", "#5c616e", "#7a7876", "#9a9073", "#bbab67", "#dcc84e", "#fee838")
"""Colours of heat maps, from Cividis, which can be read by those who do not see red and green apart."""
_APART = ("#1f5fa8", "#5a94cc", "#8db6dd", "#c3d7ea", "#dfe3e8", "#f6dcb9", "#f0b469", "#dd7a1e", "#a44703")
_APART_DARK = ("#8cc4ff", "#5a94cc", "#3c6b9c", "#334a63", "#3d444d", "#5c4a33", "#96652b", "#dd7a1e", "#ffb067")

_RULES = """
:root{color-scheme:light dark}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Noto Sans","DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 24px 64px}
h1{font-size:26px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:18px;margin:40px 0 4px}
h3{font-size:15px;margin:22px 0 2px}
p{margin:4px 0 10px;max-width:96ch}
.soft,.about{color:var(--soft)}
.about{font-size:14px;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:20px 0 14px;padding:0}
.tiles>div{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:12px 14px}
.tiles dt{color:var(--soft);font-size:13px}
.tiles dd{margin:0;font-size:25px;font-weight:650;line-height:1.25;font-variant-numeric:tabular-nums}
.tiles .small{display:block;font-size:12.5px;font-weight:400;color:var(--soft)}
.tiles .first{border-color:var(--accent)}
.tiles .first dd{color:var(--accent)}
.summary{font-size:16px}
.scroll{overflow-x:auto}
.scroll:focus-visible{outline:2px solid var(--accent)}
.drawing{display:block;width:100%;min-width:680px;height:auto;font:12px system-ui,-apple-system,"Segoe UI",Roboto,
"DejaVu Sans",sans-serif}
.definitions{position:absolute}
.tick{fill:var(--soft)}
.axis{stroke:var(--soft)}
.grid{stroke:var(--grid)}
.hatching{stroke:var(--hatching);stroke-width:1.5}
.hatched{fill:url(#hatch)}
.ground{fill:var(--ground)}
.on{font-weight:600;font-size:12px;fill:var(--ink)}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}
.line-a{stroke:var(--accent)}
.line-b{stroke:var(--line-b);stroke-dasharray:6 3}
.band{fill:var(--band)}
.of-band{stroke:var(--accent);stroke-width:1;opacity:.7}
.change{stroke:var(--soft);stroke-dasharray:3 3;fill:none}
.config-0{fill:var(--config-0)}.config-1{fill:var(--config-1)}
.remark-0{fill:var(--remark-0)}.remark-1{fill:var(--remark-1)}
.mark{fill:var(--soft);stroke:none}
.mark-failure{fill:none;stroke:var(--failure);stroke-width:2.6}
.mark-hang,.mark-numbers{fill:var(--failure)}
.mark-restart{fill:var(--accent)}
.mark-membership{fill:#7f63b8}
.mark-memory{fill:#c2571a}
.mark-checkpoint{fill:#1a9173}
.legend{display:flex;flex-wrap:wrap;gap:3px 16px;list-style:none;padding:0;margin:6px 0 12px;font-size:13px}
.legend li{display:flex;align-items:center;gap:6px}
.swatch{flex:none;border-radius:3px;vertical-align:-2px}
.stroke{display:inline-block;width:26px;border-top:2.5px solid var(--accent)}
.stroke.b{border-top:2.5px dashed var(--line-b)}
table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums;width:100%}
caption{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
th,td{text-align:left;padding:5px 12px 5px 0;border-bottom:1px solid var(--grid);vertical-align:top}
thead th{color:var(--soft);font-weight:500;white-space:nowrap;border-bottom-color:var(--rule)}
tbody th{font-weight:600;white-space:nowrap}
td{white-space:nowrap}
td.words{white-space:normal;min-width:240px;overflow-wrap:anywhere}
.ledger td.words{color:var(--soft)}
.ledger td.number,.ledger thead th:nth-child(3),.ledger thead th:nth-child(4),.ledger thead th:nth-child(5)
{text-align:right;padding-right:22px}
.ledger td:first-child{width:26px}
tr.sum>*{border-top:1.5px solid var(--soft);border-bottom:1.5px solid var(--soft);font-weight:650}
ul.plain{padding-left:20px;margin:6px 0}
ul.plain li{margin:4px 0;overflow-wrap:anywhere}
.kind{font-weight:650}
details{margin:8px 0}
summary{cursor:pointer;color:var(--accent)}
footer{margin-top:48px;color:var(--soft);font-size:13px;border-top:1px solid var(--rule);padding-top:12px}
#tip{position:absolute;z-index:3;pointer-events:none;background:var(--page);color:var(--ink);
border:1px solid var(--rule);
border-radius:8px;box-shadow:0 4px 16px #0004;padding:8px 11px;font-size:12.5px;line-height:1.45;white-space:pre;
display:none;font-variant-numeric:tabular-nums}
.cursor{stroke:var(--ink);stroke-width:1;opacity:.55;pointer-events:none}
@media screen and (max-width:640px){.ledger td.words,.ledger thead th:last-child{display:none}
.over-time{min-width:900px}td.words{min-width:360px}main{padding:18px 14px 48px}h1{font-size:21px}.tiles{gap:8px;
grid-template-columns:repeat(auto-fit,minmax(128px,1fr))}.tiles dd{font-size:21px}}
@media print{body{font-size:11px}main{max-width:none;padding:0}.drawing{min-width:0}.scroll{overflow:visible}
h2,h3{break-after:avoid}.drawing,.tiles,tr{break-inside:avoid}*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
td,tbody th{white-space:normal}#tip{display:none!important}}
"""


def style() -> str:
    """The style sheet of a report."""
    fills = "".join(
        f".fill-{name}{{fill:{colour}}}.on-{name} text{{fill:{ink};font-weight:600}}"
        for name, (colour, ink) in _ENTRIES.items()
    )
    heat = "".join(f".heat-{each}{{fill:{_HEAT[each]}}}" for each in range(NUM_COLOURS))
    apart = "".join(f".apart-{each}{{fill:{_APART[each]}}}" for each in range(NUM_COLOURS))
    apart_dark = "".join(f".apart-{each}{{fill:{_APART_DARK[each]}}}" for each in range(NUM_COLOURS))
    in_dark = f":root{{{_variables(_DARK)}}}{apart_dark}.fill-stopped{{fill:#555c66}}.on-stopped text{{fill:#fff}}"
    dark = f"@media screen and (prefers-color-scheme:dark){{{in_dark}}}"
    return f":root{{{_variables(_LIGHT)}}}{_RULES}{fills}{heat}{apart}{dark}"


def _variables(colours: Mapping[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())


# --- what the page does where scripts may run: it says what lies under the pointer -----------------------------------
# Without it, nothing is missing.

_MOST_NAMED = 6
_CODE = """
(function(){"use strict";
var data=JSON.parse(document.getElementById("columns").textContent),tip=document.getElementById("tip"),lines=[];
var drawings=Array.prototype.slice.call(document.querySelectorAll("svg.over-time"));
drawings.forEach(function(drawing){
 var line=document.createElementNS("http://www.w3.org/2000/svg","line"),box=drawing.viewBox.baseVal;
 line.setAttribute("class","cursor");line.setAttribute("y1",0);line.setAttribute("y2",box.height-22);
 line.style.display="none";drawing.appendChild(line);lines.push(line);
 drawing.addEventListener("pointermove",function(event){
  var bounds=drawing.getBoundingClientRect(),x=(event.clientX-bounds.left)/bounds.width*data.width;
  if(x<data.left||x>data.right){return hide();}
  var share=(x-data.left)/(data.right-data.left),found=null;
  data.columns.some(function(each){if(each[0]<=share&&share<=each[1]){found=each;}return found;});
  lines.forEach(function(each){each.style.display="";each.setAttribute("x1",x);each.setAttribute("x2",x);});
  if(!found){tip.style.display="none";return;}
  tip.textContent=found[2];tip.style.display="block";
  var left=event.pageX+16,width=tip.offsetWidth;
  if(left+width>window.scrollX+document.documentElement.clientWidth-8){left=event.pageX-width-16;}
  tip.style.left=Math.max(left,4)+"px";tip.style.top=(event.pageY+14)+"px";
 });
 drawing.addEventListener("pointerleave",hide);
});
function hide(){tip.style.display="none";lines.forEach(function(each){each.style.display="none";});}
})();
"""


def script(record: RunRecord, columns: TimeColumns) -> str:
    """The script of a report with its data, as HTML elements: shows the interval under the pointer in numbers."""
    length = max(record.end - record.begin, 1e-9)
    found = [
        [
            round((column.begin - record.begin) / length, 5),
            round((column.end - record.begin) / length, 5),
            _words(record, column),
        ]
        for column in columns
    ]
    data = json.dumps({"width": WIDTH, "left": LEFT, "right": RIGHT, "columns": found}, ensure_ascii=True)
    safe = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f'<script type="application/json" id="columns">{safe}</script><script>{_CODE}</script>'


def _words(record: RunRecord, column: Column) -> str:
    """The numbers of an interval in words, on several lines."""
    lines = [f"after {elapsed_in_words(column.begin - record.begin)}"]
    ordered = sorted(
        (entry for entry in ORDER if column.shares.get(entry, 0.0) > 0), key=lambda each: -column.shares[each]
    )
    lines += [f"{percent(column.shares[entry])}  {LABELS[entry]}" for entry in ordered[:_MOST_NAMED]]
    steps = middle([sums.step_seconds / sums.num_steps for sums in column.sums.values() if sums.num_steps > 0])
    if steps is not None:
        lines.append(f"step time {seconds_in_words(steps)}")
    first = column.sums.get(record.ranks[0].rank)
    if first is not None and first.step_seconds > 0 and first.num_samples > 0:
        lines.append(f"{amount(first.num_samples / first.step_seconds)} samples/s in steps")
    lines += [f"{name} {value:.4g}" for name, value in list(column.logged.items())[:_MOST_NAMED]]
    return "\n".join(lines)
