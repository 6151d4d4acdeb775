"""What the page does where scripts may run: it says what lies under the pointer. Without it, nothing is missing."""

from __future__ import annotations

import json

from .columns import Column, Columns, middle
from .entries import LABELS, ORDER
from .frame import LEFT, RIGHT, WIDTH
from .numbers import amount, elapsed_in_words, percent, seconds_in_words
from .record import RunRecord

__all__ = ["script"]

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


def script(record: RunRecord, columns: Columns) -> str:
    """The script with what it shows, in elements of a page."""
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
    """What is known of an interval, on several lines."""
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
    return "\n".join(lines)
