"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
const tip = find("tip");

// Shows a tooltip next to the pointer. It is set as text, so that markup in logs and events stays inert.
function showTip(event, text) {
  tip.textContent = text;
  tip.style.display = "block";
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8))}px`;
}

