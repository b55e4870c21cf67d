// Follows the page once it is visible, and says so when nodeagent ui has ended: what is shown would stay as it is.
"use strict";
// Browsers open six connections to a server at most: pages that are opened in the background must not use them up.
function follow() {
  const live = document.getElementById("live");
  if (document.hidden || live.hasAttribute("hx-sse:connect")) return;
  live.setAttribute("hx-sse:connect", live.dataset.stream);
  htmx.process(live);
}
// After htmx has begun, which it does in the same way: one that processed the page again would open a second stream.
setTimeout(follow);
document.addEventListener("visibilitychange", follow);
for (const lost of ["htmx:error", "htmx:sse:error"]) {
  document.addEventListener(lost, () => { document.getElementById("ended").hidden = false; });
}
document.addEventListener("htmx:sse:after:connection", () => { document.getElementById("ended").hidden = true; });
