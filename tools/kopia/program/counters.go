package main

import (
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// latency is the histogram of how long requests to the storage take, by their method.
// Source: kopia 0.23.1, repo/blob/storagemetrics/storage_metrics.go.
const latency = "kopia_blob_storage_latency_ms"

// counters are kopia's metrics about contents and blobs, by their names, each summed over its labels.
type counters map[string]float64

func readCounters() counters {
	found := counters{}

	families, err := prometheus.DefaultGatherer.Gather()
	if err != nil {
		return found
	}

	for _, family := range families {
		name := family.GetName()
		if !strings.HasPrefix(name, "kopia_content_") && !strings.HasPrefix(name, "kopia_blob_") {
			continue
		}

		for _, one := range family.GetMetric() {
			if one.GetCounter() != nil {
				found[name] += one.GetCounter().GetValue()
			}

			if histogram := one.GetHistogram(); histogram != nil && name == latency {
				for _, label := range one.GetLabel() {
					found[fmt.Sprintf("%v_sum{%v=%q}", name, label.GetName(), label.GetValue())] = histogram.GetSampleSum()
					found[fmt.Sprintf("%v_count{%v=%q}", name, label.GetName(), label.GetValue())] = float64(histogram.GetSampleCount())
				}
			}
		}
	}

	return found
}

// since returns what was counted after a reading, as Prometheus writes it.
func (c counters) since(before counters) string {
	var text strings.Builder

	for _, name := range slices.Sorted(maps.Keys(c)) {
		fmt.Fprintf(&text, "%v %v\n", name, c[name]-before[name])
	}

	return text.String()
}

// serveCounters serves what is counted after a reading, for the meter of a call; the returned function ends that.
func serveCounters(address string, before counters) func() {
	if address == "" {
		return func() {}
	}

	listener, err := net.Listen("tcp", address)
	if err != nil {
		// As kopia does: the call itself does not depend on it.
		return func() {}
	}

	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { //nolint:gosec // loopback
		io.WriteString(w, readCounters().since(before)) //nolint:errcheck
	})}
	go server.Serve(listener) //nolint:errcheck

	return func() { server.Close() } //nolint:errcheck
}
