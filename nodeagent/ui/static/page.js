// Says so when nodeagent ui has ended: what is shown would stay as it is without a word.
"use strict";
for (const lost of ["htmx:error", "htmx:sse:error"]) {
  document.addEventListener(lost, () => { document.getElementById("ended").hidden = false; });
}
document.addEventListener("htmx:sse:after:connection", () => { document.getElementById("ended").hidden = true; });
