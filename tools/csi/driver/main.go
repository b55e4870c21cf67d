// The test bed's CSI driver: volumes in sparse files over loop devices, served to the released sidecars and to kubelets.
//
// One process for each node serves all services. The volumes are the same on all nodes: a file system is mounted
// once, in the storage's folder, and a node binds it from there, as with a file server. So volumes need no image of the
// driver, tests fill and read them in that folder, and a snapshot can flush what any node has written.
//
// Source: https://github.com/container-storage-interface/spec/blob/v1.12.0/spec.md
package main

import (
	"context"
	"flag"
	"log"
	"net"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

const version = "0.1.0"

type driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedGroupControllerServer
	csi.UnimplementedNodeServer
	csi.UnimplementedSnapshotMetadataServer
	name   string
	node   string
	store  *store
	faults *faults
	locks  locks
}

func main() {
	name := flag.String("name", "", "name of the driver")
	node := flag.String("node", "", "name of this node")
	base := flag.String("base", "", "folder of the storage, the same on all nodes")
	socket := flag.String("socket", "", "where to listen")
	kubelet := flag.String("kubelet", "/var/lib/kubelet", "folder of the kubelet, in which the driver registers itself")
	kubeconfig := flag.String("kubeconfig", "", "access to the objects that ask for faults")
	flag.Parse()
	faults, err := newFaults(*kubeconfig)
	if err != nil {
		log.Fatal(err)
	}
	d := &driver{name: *name, node: *node, store: &store{*base}, faults: faults, locks: newLocks()}
	if err := write(d.store.node(*node), *socket); err != nil {
		log.Fatal(err)
	}
	go d.register(*socket, filepath.Join(*kubelet, "plugins_registry", *name+"-reg.sock"))
	server := grpc.NewServer(grpc.UnaryInterceptor(serve))
	csi.RegisterIdentityServer(server, d)
	csi.RegisterControllerServer(server, d)
	csi.RegisterGroupControllerServer(server, d)
	csi.RegisterNodeServer(server, d)
	csi.RegisterSnapshotMetadataServer(server, d)
	log.Fatal(server.Serve(listen(*socket)))
}

func listen(socket string) net.Listener {
	_ = os.Remove(socket) // of a driver that was killed
	if err := os.MkdirAll(filepath.Dir(socket), 0o755); err != nil {
		log.Fatal(err)
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		log.Fatal(err)
	}
	return listener
}

// required are the fields that a request must have, by its type.
var required = map[string][]protoreflect.Name{
	"CreateVolumeRequest":               {"name", "volume_capabilities"},
	"DeleteVolumeRequest":               {"volume_id"},
	"ControllerPublishVolumeRequest":    {"volume_id", "node_id", "volume_capability"},
	"ControllerUnpublishVolumeRequest":  {"volume_id"},
	"ValidateVolumeCapabilitiesRequest": {"volume_id", "volume_capabilities"},
	"ControllerExpandVolumeRequest":     {"volume_id", "capacity_range"},
	"CreateSnapshotRequest":             {"name", "source_volume_id"},
	"DeleteSnapshotRequest":             {"snapshot_id"},
	"CreateVolumeGroupSnapshotRequest":  {"name", "source_volume_ids"},
	"GetVolumeGroupSnapshotRequest":     {"group_snapshot_id"},
	"DeleteVolumeGroupSnapshotRequest":  {"group_snapshot_id"},
	"NodePublishVolumeRequest":          {"volume_id", "target_path", "volume_capability"},
	"NodeUnpublishVolumeRequest":        {"volume_id", "target_path"},
	"NodeGetVolumeStatsRequest":         {"volume_id", "volume_path"},
}

// serve checks the fields of a request, and logs the error that it ends with.
func serve(ctx context.Context, in any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	message := in.(proto.Message).ProtoReflect()
	for _, name := range required[string(message.Descriptor().Name())] {
		if !message.Has(message.Descriptor().Fields().ByName(name)) {
			return nil, status.Errorf(codes.InvalidArgument, "%s has no %s", message.Descriptor().Name(), name)
		}
	}
	out, err := handler(ctx, in)
	if err != nil {
		log.Printf("%s: %v", info.FullMethod, err)
		if _, ok := status.FromError(err); !ok {
			err = status.Error(codes.Internal, err.Error())
		}
	}
	return out, err
}

// registrar is what node-driver-registrar does for other drivers.
// Source: https://kubernetes.io/docs/reference/node/device-plugin-api-versions/ and kubelet's pkg/kubelet/pluginmanager.
type registrar struct {
	registration.UnimplementedRegistrationServer
	info *registration.PluginInfo
}

func (d *driver) register(endpoint, socket string) {
	server := grpc.NewServer()
	info := &registration.PluginInfo{
		Type: registration.CSIPlugin, Name: d.name, Endpoint: endpoint, SupportedVersions: []string{"1.0.0"},
	}
	registration.RegisterRegistrationServer(server, &registrar{info: info})
	log.Fatal(server.Serve(listen(socket)))
}

func (r *registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return r.info, nil
}

func (r *registrar) NotifyRegistrationStatus(
	_ context.Context, in *registration.RegistrationStatus,
) (*registration.RegistrationStatusResponse, error) {
	if !in.PluginRegistered {
		log.Printf("the kubelet does not accept the driver: %s", in.Error)
	}
	return &registration.RegistrationStatusResponse{}, nil
}

func (d *driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: d.name, VendorVersion: version}, nil
}

func (d *driver) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{}, nil
}

func (d *driver) GetPluginCapabilities(
	context.Context, *csi.GetPluginCapabilitiesRequest,
) (*csi.GetPluginCapabilitiesResponse, error) {
	service := func(t csi.PluginCapability_Service_Type) *csi.PluginCapability {
		return &csi.PluginCapability{Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: t}}}
	}
	expansion := &csi.PluginCapability_VolumeExpansion{Type: csi.PluginCapability_VolumeExpansion_ONLINE}
	return &csi.GetPluginCapabilitiesResponse{Capabilities: []*csi.PluginCapability{
		service(csi.PluginCapability_Service_CONTROLLER_SERVICE),
		service(csi.PluginCapability_Service_GROUP_CONTROLLER_SERVICE),
		service(csi.PluginCapability_Service_SNAPSHOT_METADATA_SERVICE),
		service(csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS),
		{Type: &csi.PluginCapability_VolumeExpansion_{VolumeExpansion: expansion}},
	}}, nil
}
