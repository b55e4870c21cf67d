package main

import (
	"context"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/clientcmd"
)

// Faults that tests ask the storage for. A fault is one value: `slow:SECONDS`, `fail:MESSAGE` or `never`. It is given by
//
//   - the annotation bed.node-agent.test/fault on the claim or VolumeSnapshot, or on its class,
//   - a line of any key of the ConfigMap default/bed-faults, for objects whose maker does not ask the test:
//     `WHAT NAMESPACE/NAME FAULT`, where WHAT is provision, attach, snapshot, changes or delete, and NAMESPACE/NAME is a
//     pattern, as in `provision velero/* slow:20`. A volume and a VolumeSnapshotContent have the namespace and name of
//     the claim or snapshot they are for.
const faultAnnotation = "bed.node-agent.test/fault"

const pollInterval = 200 * time.Millisecond

var (
	configMaps      = schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}
	claims          = schema.GroupVersionResource{Version: "v1", Resource: "persistentvolumeclaims"}
	storageClasses  = schema.GroupVersionResource{Group: "storage.k8s.io", Version: "v1", Resource: "storageclasses"}
	snapshots       = snapshotResource("volumesnapshots")
	snapshotClasses = snapshotResource("volumesnapshotclasses")
)

func snapshotResource(name string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "snapshot.storage.k8s.io", Version: "v1", Resource: name}
}

// subject is the claim or VolumeSnapshot that a call is about.
type subject struct {
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	Class     string    `json:"class"`
	Snapshot  bool      `json:"snapshot"`
	Created   time.Time `json:"created"`
}

type faults struct {
	client dynamic.Interface // nil: no objects, so no faults
}

func newFaults(kubeconfig string) (*faults, error) {
	if kubeconfig == "" {
		return &faults{}, nil
	}
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, err
	}
	config.QPS, config.Burst = -1, -1
	client, err := dynamic.NewForConfig(config)
	return &faults{client}, err
}

func (f *faults) get(ctx context.Context, kind schema.GroupVersionResource, namespace, name string) map[string]any {
	if name == "" || f.client == nil {
		return nil
	}
	found, err := f.client.Resource(kind).Namespace(namespace).Get(ctx, name, meta.GetOptions{})
	if err != nil {
		return nil // none, or it is gone: then nobody asks for a fault by it
	}
	return found.Object
}

// describe completes a subject with its class and age; of one that is gone, what was known stays.
func (f *faults) describe(ctx context.Context, about subject) subject {
	kind, field := claims, "storageClassName"
	if about.Snapshot {
		kind, field = snapshots, "volumeSnapshotClassName"
	}
	if found := f.get(ctx, kind, about.Namespace, about.Name); found != nil {
		about.Class, _, _ = unstructured.NestedString(found, "spec", field)
		object := unstructured.Unstructured{Object: found}
		about.Created = object.GetCreationTimestamp().Time
	}
	return about
}

// find returns the fault that the nearest object names, as its kind and value.
func (f *faults) find(ctx context.Context, what string, about subject) (string, string) {
	kind, classes := claims, storageClasses
	if about.Snapshot {
		kind, classes = snapshots, snapshotClasses
	}
	asking := []map[string]any{f.get(ctx, kind, about.Namespace, about.Name), f.get(ctx, classes, "", about.Class)}
	if what == "delete" {
		asking = nil // an object whose creation fails can be deleted
	}
	for _, object := range asking {
		if text, _, _ := unstructured.NestedString(object, "metadata", "annotations", faultAnnotation); text != "" {
			kind, value, _ := strings.Cut(text, ":")
			return kind, value
		}
	}
	data, _, _ := unstructured.NestedStringMap(f.get(ctx, configMaps, "default", "bed-faults"), "data")
	for _, key := range slices.Sorted(maps.Keys(data)) {
		for _, line := range strings.Split(data[key], "\n") {
			parts := strings.SplitN(strings.TrimSpace(line), " ", 3)
			if len(parts) < 3 || parts[0] != what {
				continue
			}
			if matches(parts[1], about.Namespace+"/"+about.Name) {
				kind, value, _ := strings.Cut(parts[2], ":")
				return kind, value
			}
		}
	}
	return "", ""
}

// matches compares with a pattern in which `*` stands for anything but the slash.
func matches(pattern, name string) bool {
	ok, _ := path.Match(pattern, name)
	return ok
}

// holds tells whether a call has to wait, or the error that it is to end with.
func (f *faults) holds(ctx context.Context, what string, about subject, since time.Time) (bool, error) {
	kind, value := f.find(ctx, what, about)
	switch kind {
	case "fail":
		return false, status.Error(codes.Internal, strings.TrimSpace(value))
	case "never":
		return true, nil
	case "slow":
		seconds, err := strconv.ParseFloat(value, 64)
		return err == nil && time.Since(since).Seconds() < seconds, nil
	}
	return false, nil
}

// wait returns when no fault holds the call any more, or with the error it is to end with.
func (f *faults) wait(ctx context.Context, what string, about subject, since time.Time) error {
	for {
		holds, err := f.holds(ctx, what, about, since)
		if err != nil || !holds {
			return err
		}
		select {
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		case <-time.After(pollInterval):
		}
	}
}
