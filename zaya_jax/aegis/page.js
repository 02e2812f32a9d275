"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
const tip = find("tip");

// Says something beside the pointer, as text: whatever a log or a run said stays what it is.
function tell(event, text) {
  tip.textContent = text;
  tip.style.display = "block";
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8))}px`;
}

