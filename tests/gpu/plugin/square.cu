// SquarePlus: c = a * a + shift, elementwise, FP32, any shape. An operator of its own for TensorRT 8.6 and 10.
//
//   nvcc -O2 -shared -Xcompiler -fPIC -I INCLUDE -o libsquare.so square.cu -L LIB -l:libnvinfer.so.8
//
// The library must name libnvinfer as one that it needs: Python's module does not share its symbols.
// TensorRT 10 deprecates IPluginV2DynamicExt and 11 drops it. IPluginV3 splits the same functions into three parts:
// core (name, version), build (shapes, formats) and runtime (enqueue); its creator is an IPluginCreatorV3One.

#include <NvInfer.h>

#include <cstring>
#include <string>

namespace
{

constexpr char const* kNAME = "SquarePlus"; // the ONNX parser looks for the operator's name, whatever its domain
constexpr char const* kVERSION = "1";       // and for "1", unless the node has an attribute plugin_version

__global__ void squarePlus(float const* a, float* c, int64_t count, float shift)
{
    int64_t const stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride)
    {
        c[i] = a[i] * a[i] + shift;
    }
}

class SquarePlus : public nvinfer1::IPluginV2DynamicExt
{
public:
    explicit SquarePlus(float shift)
        : mShift(shift)
    {
    }

    // What it computes.

    int32_t enqueue(nvinfer1::PluginTensorDesc const* inputs, nvinfer1::PluginTensorDesc const*,
        void const* const* from, void* const* to, void*, cudaStream_t stream) noexcept override
    {
        int64_t count = 1;
        for (int32_t axis = 0; axis < inputs[0].dims.nbDims; ++axis)
        {
            count *= inputs[0].dims.d[axis];
        }
        squarePlus<<<256, 256, 0, stream>>>(
            static_cast<float const*>(from[0]), static_cast<float*>(to[0]), count, mShift);
        return cudaGetLastError() == cudaSuccess ? 0 : 1;
    }

    // What the builder asks.

    nvinfer1::DimsExprs getOutputDimensions(int32_t, nvinfer1::DimsExprs const* inputs, int32_t,
        nvinfer1::IExprBuilder&) noexcept override
    {
        return inputs[0];
    }

    nvinfer1::DataType getOutputDataType(int32_t, nvinfer1::DataType const*, int32_t) const noexcept override
    {
        return nvinfer1::DataType::kFLOAT;
    }

    bool supportsFormatCombination(
        int32_t place, nvinfer1::PluginTensorDesc const* tensors, int32_t, int32_t) noexcept override
    {
        return tensors[place].type == nvinfer1::DataType::kFLOAT
            && tensors[place].format == nvinfer1::TensorFormat::kLINEAR;
    }

    int32_t getNbOutputs() const noexcept override
    {
        return 1;
    }

    size_t getWorkspaceSize(nvinfer1::PluginTensorDesc const*, int32_t, nvinfer1::PluginTensorDesc const*,
        int32_t) const noexcept override
    {
        return 0;
    }

    void configurePlugin(nvinfer1::DynamicPluginTensorDesc const*, int32_t, nvinfer1::DynamicPluginTensorDesc const*,
        int32_t) noexcept override
    {
    }

    // What stands in the engine.

    size_t getSerializationSize() const noexcept override
    {
        return sizeof(mShift);
    }

    void serialize(void* buffer) const noexcept override
    {
        std::memcpy(buffer, &mShift, sizeof(mShift));
    }

    // Its name and its life.

    char const* getPluginType() const noexcept override
    {
        return kNAME;
    }

    char const* getPluginVersion() const noexcept override
    {
        return kVERSION;
    }

    void setPluginNamespace(char const* name) noexcept override
    {
        mNamespace = name;
    }

    char const* getPluginNamespace() const noexcept override
    {
        return mNamespace.c_str();
    }

    nvinfer1::IPluginV2DynamicExt* clone() const noexcept override
    {
        auto* const copy = new SquarePlus(mShift);
        copy->setPluginNamespace(mNamespace.c_str());
        return copy;
    }

    int32_t initialize() noexcept override
    {
        return 0;
    }

    void terminate() noexcept override {}

    void destroy() noexcept override
    {
        delete this;
    }

private:
    float mShift;
    std::string mNamespace;
};

class SquarePlusCreator : public nvinfer1::IPluginCreator
{
public:
    nvinfer1::IPluginV2* createPlugin(
        char const*, nvinfer1::PluginFieldCollection const* attributes) noexcept override
    {
        float shift = 0.0F;
        for (int32_t i = 0; i < attributes->nbFields; ++i)
        {
            if (std::strcmp(attributes->fields[i].name, "shift") == 0)
            {
                shift = *static_cast<float const*>(attributes->fields[i].data);
            }
        }
        return new SquarePlus(shift);
    }

    nvinfer1::IPluginV2* deserializePlugin(char const*, void const* data, size_t size) noexcept override
    {
        float shift = 0.0F;
        if (size != sizeof(shift))
        {
            return nullptr;
        }
        std::memcpy(&shift, data, size);
        return new SquarePlus(shift);
    }

    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override
    {
        return &mAttributes;
    }

    char const* getPluginName() const noexcept override
    {
        return kNAME;
    }

    char const* getPluginVersion() const noexcept override
    {
        return kVERSION;
    }

    void setPluginNamespace(char const* name) noexcept override
    {
        mNamespace = name;
    }

    char const* getPluginNamespace() const noexcept override
    {
        return mNamespace.c_str();
    }

private:
    nvinfer1::PluginField mShift{"shift", nullptr, nvinfer1::PluginFieldType::kFLOAT32, 1};
    nvinfer1::PluginFieldCollection mAttributes{1, &mShift};
    std::string mNamespace;
};

} // namespace

REGISTER_TENSORRT_PLUGIN(SquarePlusCreator);
