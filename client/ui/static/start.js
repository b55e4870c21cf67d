// Shows the page once the cluster was read, and until then why it was not.
"use strict";
const events = new EventSource(location.href);
events.addEventListener("message", () => location.reload());
events.addEventListener("why", (event) => {
  document.getElementById("state").textContent = `The cluster was not read yet: ${event.data}.`;
});
